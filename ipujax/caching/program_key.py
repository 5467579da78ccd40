"""Key of a program in the cache: a digest of everything that its numbers and its profile depend on.

Input: a lowering plan. Output: 64 hexadecimal digits, or `NoDigestError` where something cannot be read.
Limits: numbers and profile depend on nothing else only as long as each part of the compiler reads these values alone;
files of ipujax itself count by name, size and time, and by the names that the program replaced in its modules.
"""

from __future__ import annotations

import dataclasses

from ipujax.lowering.digests import NoDigestError, digest_of, jaxpr_digest
from ipujax.lowering.dumps import DumpRequest
from ipujax.lowering.refs import is_ref
from ipujax.lowering_plan import LoweringPlan
from ipujax.runtime.options import Options
from ipujax.storage.versions import compiler_state

# Options without effect on numbers and profile.
_WITHOUT_EFFECT = frozenset({"progress", "cache_dir", "check"})


def program_key(plan: LoweringPlan) -> str:
    """Return the key of a program.

    Raises:
        NoDigestError: it has none; the text names the value that cannot be read.
    """
    signature = plan.signature
    if plan.spread is not None:
        raise NoDigestError("its replicas are on several instances")
    if plan.mesh is not None or any(x is not None for x in (*plan.shardings.inputs, *plan.shardings.outputs)):
        raise NoDigestError("shardings partition it")
    if plan.refs or any(map(is_ref, signature.in_avals)):
        raise NoDigestError("it changes a Ref")
    request = DumpRequest.from_environment()
    if request.dots or request.kinds:
        raise NoDigestError("the environment asks for dumps of its compilation")
    return digest_of(
        compiler_state(),
        plan.target.to_data(),
        options_data(plan.options),
        (str(plan.name), plan.name.file, plan.line),
        (signature.donated, signature.offloaded, signature.used, signature.arguments, signature.leaf_names),
        tuple(plan.positions),
        jaxpr_digest(plan.jaxpr),
    )


def options_data(options: Options) -> dict[str, object]:
    """Return the options that numbers or profile depend on, by name."""
    names = (field.name for field in dataclasses.fields(options))
    return {name: getattr(options, name) for name in names if name not in _WITHOUT_EFFECT}
