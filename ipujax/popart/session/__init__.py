"""Sessions: models, steps, weights and reports."""

from ipujax.popart.session.inference import InferenceSession as InferenceSession
from ipujax.popart.session.legacy_losses import (
    IdentityLoss as IdentityLoss,
    L1Loss as L1Loss,
    NllLoss as NllLoss,
)
from ipujax.popart.session.training import TrainingSession as TrainingSession
