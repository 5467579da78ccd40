"""Are elasticities those of differences? Each constant of each model, against programs costed on two machines.

    python benchmarks/elasticities.py [--only MODEL]

The elasticity of `ipu.sensitivities` to a constant has to be within 2 %, or 0.1 % of all cycles, of the central
difference of ±0.1 % of it, or where two tiles tie of a difference of one side. Here each machine is costed alone, while
`ipu.sensitivities` costs all together, and divides them among lines and layers, whose sums are compared too. Prints
the constants with an effect, and those that are wrong; the exit status is 1 if any is.
"""

from __future__ import annotations

import argparse
import sys
import warnings

from models import COMPARED, MODELS

import ipujax as ipu


def sensitivities_of(name: str) -> ipu.Sensitivities:
    """Elasticities of the training step of a model."""
    model = MODELS[name]()
    options = ipu.Options(**model.options)
    step = ipu.jit(model.step, device=model.device(), donate_argnums=model.donate_argnums, options=options, **model.jit)
    return ipu.sensitivities(step, *model.args)


def wrong_constants(sensitivities: ipu.Sensitivities) -> list[str]:
    """A text for each constant whose elasticity is that of no difference, or not the sum of its lines or layers."""
    base = sensitivities.cycles_at()
    texts = []
    for row in sensitivities.rows:
        constant, value, change = row["constant"], row["value"], row["elasticity"] * base
        up, down = (sensitivities.cycles_at(**{constant: value * factor}) for factor in (1.001, 0.999))
        sides = {"central": (up - down) / 0.002, "larger": (up - base) / 0.001, "smaller": (base - down) / 0.001}
        if all(abs(change - side) > 0.02 * abs(side) + 0.001 * base for side in sides.values()):
            texts.append(f"{constant}: {change / base:+.5f}; " + str({k: round(v / base, 5) for k, v in sides.items()}))
        for kind, parts in (("lines", sensitivities.by_line), ("layers", sensitivities.by_layer)):
            total = sum(part["elasticities"][constant] for part in parts)
            if abs(total - row["elasticity"]) > 0.001:
                texts.append(f"{constant}: {row['elasticity']:+.5f}; its {kind} {total:+.5f}")
    return texts


def main() -> int:
    """Compare the elasticities of models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, action="append", help="of the models; those compared by default")
    warnings.simplefilter("ignore")
    count = failures = 0
    for name in parser.parse_args().only or COMPARED:
        sensitivities = sensitivities_of(name)
        texts = wrong_constants(sensitivities)
        effects = sum(abs(row["elasticity"]) > 1e-6 for row in sensitivities.rows)
        count += len(sensitivities.rows)
        failures += len(texts)
        print(
            f"{name:<16}{len(sensitivities.rows):>4} constants, {effects:>3} with an effect, {len(texts)} wrong",
            flush=True,
        )
        for text in texts:
            print(f"    {text}", flush=True)
    print(f"{count} elasticities, {failures} wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
