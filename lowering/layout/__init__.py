"""Where values lie and how they are kept, decided for a whole jaxpr before anything is lowered."""

from ipujax.lowering.layout.channel_groups import grouped_inputs as grouped_inputs
