"""Matrix multiplication and convolution: planner, cycle formulas, codelets. Shared arguments are those of `popops`."""

from ipujax.lowering.poplin.convolution import convolution as convolution
from ipujax.lowering.poplin.matmul import matmul as matmul
from ipujax.lowering.poplin.product_plan import plan_convolution as plan_convolution, plan_matmul as plan_matmul
from ipujax.lowering.poplin.spec import ConvSpec as ConvSpec
