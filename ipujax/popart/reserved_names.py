"""Prefixes of the names of tensors that a session adds to those of the model.

Source: `willow/include/popart/tensornames.hpp` of github:graphcore/popart.
"""

from __future__ import annotations

from collections.abc import Callable

# Function of PopART → the prefix it returns.
PREFIXES: dict[str, str] = {
    "reservedAccumPrefix": "Accum___",
    "reservedAcclPrefix": "Accl___",
    "reservedAccl1Prefix": "Accl1___",
    "reservedAccl2Prefix": "Accl2___",
    "reservedAccl3Prefix": "Accl3___",
    "reservedStepPrefix": "Step___",
    "reservedGradientPrefix": "Gradient___",
    "reservedUpdatedVarPrefix": "UpdatedVar___",
    "reservedLossScalingPrefix": "lossScaling_",
    "reservedDefaultLearningRatePrefix": "learningRate___default___",
    "reservedSpecificLearningRatePrefix": "learningRate___specific___",
    "reservedDefaultWeightDecayPrefix": "weightDecay___default___",
    "reservedSpecificWeightDecayPrefix": "weightDecay___specific___",
    "reservedDefaultAdamBeta1Prefix": "adamBeta1___default___",
    "reservedSpecificAdamBeta1Prefix": "adamBeta1___specific___",
    "reservedDefaultAdamBeta2Prefix": "adamBeta2___default___",
    "reservedSpecificAdamBeta2Prefix": "adamBeta2___specific___",
    "reservedDefaultAdamEpsPrefix": "adamEps___default___",
    "reservedSpecificAdamEpsPrefix": "adamEps___specific___",
    "reservedRandomSeedPrefix": "randomSeed___",
    "reservedAcclToReducePrefix": "AcclIntoReduce___",
    "reservedAcclToUpdatePrefix": "AcclIntoUpdate___",
    "reservedAcclFinalOutPrefix": "AcclOutOfAcclUpdate___",
    "reservedFinalReducedGradPrefix": "FinalReducedGradient___",
    "reservedAdamUpdaterPrefix": "AdamUpdater___",
    "reservedLambR1SqPrefix": "LambR1Sq___",
    "reservedLambR2SqPrefix": "LambR2Sq___",
    "reservedStashedPrefix": "Stashed___",
    "reservedRestoredPrefix": "Restored___",
    "reservedSeedModifierPrefix": "randomSeedModifier___",
    "reservedRemoteArgPrefix": "RemoteArg___",
    "reservedDefaultWeightDecayScaleFactor0Prefix": "weightDecayScaleFactor0___default___",
    "reservedSpecificWeightDecayScaleFactor0Prefix": "weightDecayScaleFactor0___specific___",
    "reservedDefaultScaledLearningRate0Prefix": "scaledLearningRate0___default___",
    "reservedSpecificScaledLearningRate0Prefix": "scaledLearningRate0___specific___",
    "reservedDefaultScaledWeightDecay1Prefix": "scaledWeightDecay1___default___",
    "reservedSpecificScaledWeightDecay1Prefix": "scaledWeightDecay1___specific___",
    "reservedDefaultScaledLearningRate1Prefix": "scaledLearningRate1___default___",
    "reservedSpecificScaledLearningRate1Prefix": "scaledLearningRate1___specific___",
    "reservedDefaultDampeningScaleFactor1Prefix": "dampeningScaleFactor1___default___",
    "reservedSpecificDampeningScaleFactor1Prefix": "dampeningScaleFactor1___specific___",
    "reservedDefaultScaledMomentum1Prefix": "scaledMomentum1___default___",
    "reservedSpecificScaledMomentum1Prefix": "scaledMomentum1___specific___",
    "reservedDefaultLossScalingPrefix": "lossScaling___default___",
    "reservedSpecificLossScalingPrefix": "lossScaling___specific___",
    "reservedDefaultMaxWeightNormPrefix": "maxWeightNorm___default___",
    "reservedSpecificMaxWeightNormPrefix": "maxWeightNorm___specific___",
    "reservedAutomaticLossScalePrefix": "AutomaticLossScaleProxy___",
    "reservedDefaultStepPrefix": "step___default___",
    "reservedSpecificStepPrefix": "step___specific___",
}

GRADIENT = PREFIXES["reservedGradientPrefix"]
ACCUMULATOR = PREFIXES["reservedAccumPrefix"]
UPDATED = PREFIXES["reservedUpdatedVarPrefix"]


def prefix_functions() -> dict[str, Callable[[], str]]:
    """Return PopART's functions without arguments, `reservedGradientPrefix()` and its like, by name."""

    def returning(name: str, prefix: str) -> Callable[[], str]:
        def reserved() -> str:
            return prefix

        reserved.__name__ = reserved.__qualname__ = name
        reserved.__doc__ = f'Return "{prefix}".'
        return reserved

    return {name: returning(name, prefix) for name, prefix in PREFIXES.items()}
