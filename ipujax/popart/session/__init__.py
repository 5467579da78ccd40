"""Sessions: models, steps, weights and reports."""

from ipujax.popart.exceptions import OutOfMemoryException as OutOfMemoryException  # PopART has it in both places
from ipujax.popart.session.inference_session import InferenceSession as InferenceSession
from ipujax.popart.session.legacy_losses import IdentityLoss as IdentityLoss, L1Loss as L1Loss, NllLoss as NllLoss
from ipujax.popart.session.training_session import TrainingSession as TrainingSession
