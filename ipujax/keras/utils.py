"""`ipu.utils`: functions by which earlier programs configure IPUs, each for a method or an option of `IPUConfig`.

Input: a configuration. Output: the same configuration, changed. Options that `IPUConfig` does not have are refused.
"""

from __future__ import annotations

import ipujax as ipu
from ipujax.front_end import checking_calls, public_names
from ipujax.keras.config import (
    IPUConfig,
    get_ipu_config as get_ipu_config,
    reset_ipu_configuration as reset_ipu_configuration,
)

_HINTS = dict.fromkeys(
    ("profiling", "profile_execution", "report_directory", "use_poplar_text_report", "use_poplar_cbor_report"),
    "model.ipu_profile, after a run in the scope of a strategy",
)


@checking_calls("ipu.utils.create_ipu_config", hints=_HINTS)
def create_ipu_config() -> IPUConfig:
    """Return a configuration of one IPU."""
    return IPUConfig()


@checking_calls("ipu.utils.auto_select_ipus")
def auto_select_ipus(opts: IPUConfig, num_ipus: int) -> IPUConfig:
    """Set the number of IPUs of a configuration, and return it.

    Args:
        opts: a configuration.
        num_ipus: number of IPUs, a power of two.

    Raises:
        ArgumentError: the first is no configuration, or the number none that it accepts.
    """
    _check(opts, "auto_select_ipus").auto_select_ipus = num_ipus
    return opts


@checking_calls("ipu.utils.set_recomputation_options")
def set_recomputation_options(opts: IPUConfig, allow_recompute: bool = True) -> IPUConfig:
    """Set `allow_recompute` of a configuration, and return it.

    Args:
        opts: a configuration.
        allow_recompute: as `IPUConfig.allow_recompute`.

    Raises:
        ArgumentError: as `auto_select_ipus`.
    """
    _check(opts, "set_recomputation_options").allow_recompute = allow_recompute
    return opts


@checking_calls("ipu.utils.configure_ipu_system")
def configure_ipu_system(config: IPUConfig) -> None:
    """Make a configuration that of strategies without one.

    Args:
        config: a configuration.

    Raises:
        ArgumentError: it is none.
    """
    _check(config, "configure_ipu_system").configure_ipu_system()


@checking_calls("ipu.utils.get_num_of_ipus_in_device")
def get_num_of_ipus_in_device(ipu_device: str = "/device:IPU:0") -> int:
    """Return the number of IPUs of the current configuration; 1 without any.

    Args:
        ipu_device: name of the device: there is one.

    Raises:
        ArgumentError: another device.
    """
    if ipu_device != "/device:IPU:0":
        raise ipu.ArgumentError("there is one device of IPUs", expected="'/device:IPU:0'", got=repr(ipu_device))
    config = get_ipu_config()
    return 1 if config is None else int(config.auto_select_ipus)


def running_on_ipu_model() -> bool:
    """Return True: IPUs are simulated."""
    return True


def _check(config: object, function: str) -> IPUConfig:
    if not isinstance(config, IPUConfig):
        raise ipu.ArgumentError(f"ipu.utils.{function} needs a configuration", expected="IPUConfig()", got=repr(config))
    return config


__dir__ = public_names(globals())
