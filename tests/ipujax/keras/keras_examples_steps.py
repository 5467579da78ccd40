"""Programs with training steps of their own, as Keras' guides and code examples have them; see `keras_examples`.

Each is a function that makes a model and one that uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from keras import layers, ops

RNG = np.random.default_rng(12)
BATCH = 8
PICTURES = RNG.random((16, 12, 12, 1), np.float32)
CLASSES = RNG.integers(0, 4, 16)


def fitted(x: Any, y: Any = None, **settings: Any) -> Callable[[Any], Any]:
    """Fits for two epochs, evaluates and predicts."""

    def use(model: Any) -> Any:
        size = {} if isinstance(x, keras.utils.PyDataset) else {"batch_size": BATCH}
        logs = model.fit(x, y, epochs=2, verbose=0, **size, **settings).history
        scores = model.evaluate(x, y, verbose=0, return_dict=True, **size)
        return dict(sorted(logs.items())), dict(sorted(scores.items())), model.predict(x, verbose=0, **size)

    return use


def counted(metrics: Any, variables: Any, *updates: Any) -> tuple[dict[str, Any], list[Any]]:
    """Updates metrics without their state: their results, and their new variables."""
    logs = {}
    after = []
    for metric, values in zip(metrics, updates, strict=True):
        own = variables[: len(metric.variables)]
        variables = variables[len(metric.variables) :]
        own = metric.stateless_update_state(own, *values)
        logs[metric.name] = metric.stateless_result(own)
        after += own
    return logs, after


class OwnStep(keras.Model):
    """Has its own loss, weights of examples, and metrics, in training and evaluation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="loss")
        self.error = keras.metrics.MeanAbsoluteError(name="mae")
        self.of_loss = keras.losses.MeanSquaredError()

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker, self.error]

    def lost(self, trainable: Any, others: Any, x: Any, y: Any, weights: Any, training: bool) -> Any:
        y_pred, others = self.stateless_call(trainable, others, x, training=training)
        return self.of_loss(y, y_pred, weights), (y_pred, others)

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, others, optimizer, metrics = state
        x, y, weights = data
        of = jax.value_and_grad(self.lost, has_aux=True)
        (loss, (y_pred, others)), gradients = of(trainable, others, x, y, weights, True)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        logs, metrics = counted(self.metrics, metrics, (loss,), (y, y_pred))
        return logs, (trainable, others, optimizer, metrics)

    def test_step(self, state: Any, data: Any) -> Any:
        trainable, others, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        loss, (y_pred, others) = self.lost(trainable, others, x, y, None, False)
        logs, metrics = counted(self.metrics, metrics, (loss,), (y, y_pred))
        return logs, (trainable, others, metrics)


def own_step() -> keras.Model:
    inputs = keras.Input((16,))
    x = layers.Dropout(0.2)(layers.Dense(12, activation="relu")(inputs))
    return OwnStep(inputs, layers.Dense(1)(x))


class Sampling(layers.Layer):
    """Draws from a normal distribution, so that gradients reach its parameters."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seeds = keras.random.SeedGenerator(1337)

    def call(self, parameters: Any) -> Any:
        mean, log_variance = parameters
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return mean + ops.exp(0.5 * log_variance) * noise


class VAE(keras.Model):
    """A variational autoencoder; its three metrics are those of its step."""

    def __init__(self) -> None:
        super().__init__()
        image = keras.Input((8, 8, 1))
        x = layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(image)
        x = layers.Dense(6, activation="relu")(layers.Flatten()(x))
        mean = layers.Dense(2, name="mean")(x)
        log_variance = layers.Dense(2, name="log_variance")(x)
        self.encoder = keras.Model(image, [mean, log_variance, Sampling()([mean, log_variance])])
        latent = keras.Input((2,))
        x = layers.Reshape((4, 4, 3))(layers.Dense(4 * 4 * 3, activation="relu")(latent))
        x = layers.Conv2DTranspose(4, 3, activation="relu", strides=2, padding="same")(x)
        self.decoder = keras.Model(latent, layers.Conv2DTranspose(1, 3, activation="sigmoid", padding="same")(x))
        names = ("total_loss", "reconstruction_loss", "kl_loss")
        self.trackers = [keras.metrics.Mean(name=name) for name in names]

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def call(self, x: Any) -> Any:
        mean, log_variance, drawn = self.encoder(x)
        return mean, log_variance, self.decoder(drawn)

    def lost(self, trainable: Any, others: Any, x: Any) -> Any:
        (mean, log_variance, repeated), others = self.stateless_call(trainable, others, x)
        rebuilt = ops.mean(ops.sum(keras.losses.binary_crossentropy(x, repeated), axis=(1, 2)))
        apart = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        apart = ops.mean(ops.sum(apart, axis=1))
        return rebuilt + apart, (rebuilt, apart, others)

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, others, optimizer, metrics = state
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        (loss, (rebuilt, apart, others)), gradients = jax.value_and_grad(self.lost, has_aux=True)(trainable, others, x)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        logs, metrics = counted(self.metrics, metrics, (loss,), (rebuilt,), (apart,))
        return logs, (trainable, others, optimizer, metrics)


def vae_used(model: Any) -> Any:
    x = PICTURES[:, :8, :8]
    logs = model.fit(x, epochs=2, batch_size=BATCH, verbose=0).history
    grid = np.stack(np.meshgrid(np.linspace(-1, 1, 3), np.linspace(-1, 1, 3)), -1).reshape(-1, 2)
    drawn = model.decoder.predict(grid, verbose=0)
    return logs, drawn, model.encoder.predict(x, verbose=0)


class Distiller(keras.Model):
    """A small network learns from labels and from the answers of a larger one."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.student = student
        self.teacher = teacher

    def compile(
        self, student_loss: Any = None, distillation_loss: Any = None, alpha: float = 0.1, temperature: float = 3.0,
        **settings: Any,
    ) -> None:  # fmt: skip
        super().compile(**{**settings, "loss": None})
        self.student_loss = student_loss
        self.distillation_loss = distillation_loss
        self.alpha = alpha
        self.temperature = temperature

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        answered = self.teacher(x, training=False)
        soft = [ops.softmax(each / self.temperature, axis=1) for each in (answered, y_pred)]
        learned = self.distillation_loss(*soft) * self.temperature**2
        return self.alpha * self.student_loss(y, y_pred) + (1 - self.alpha) * learned

    def call(self, x: Any) -> Any:
        return self.student(x)


def small_cnn(filters: int) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            layers.Conv2D(filters, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.MaxPooling2D(2, strides=1, padding="same"),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )


def distiller() -> keras.Model:
    teacher = small_cnn(6)
    student = small_cnn(3)
    teacher.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    teacher.fit(PICTURES, CLASSES, batch_size=BATCH, epochs=1, verbose=0)
    teacher.trainable = False
    return Distiller(student, teacher)


# --- two networks against each other ----------------------------------------------------------------------------------

LATENT = 4
KINDS = 3
REAL = RNG.random((16, 8, 8, 1), np.float32)
REAL_KINDS = keras.utils.to_categorical(RNG.integers(0, KINDS, 16), KINDS)


def discriminator(channels: int = 1 + KINDS) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, channels)),
            layers.Conv2D(6, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.GlobalMaxPooling2D(),
            layers.Dense(1),
        ],
        name="discriminator",
    )


def generator(width: int = LATENT + KINDS) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((width,)),
            layers.Dense(4 * 4 * width),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Reshape((4, 4, width)),
            layers.Conv2DTranspose(6, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ],
        name="generator",
    )


def with_kinds(pictures: Any, kinds: Any) -> Any:
    """Pictures with a channel for each kind, all ones or all zeros."""
    maps = ops.broadcast_to(kinds[:, None, None, :], (*pictures.shape[:3], KINDS))
    return ops.concatenate([pictures, ops.cast(maps, pictures.dtype)], axis=-1)


class ConditionalGAN(keras.Model):
    """A step trains both networks, each with an optimizer of its own.

    The generator's optimizer keeps its variables with those of the model that are not trained.
    """

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = discriminator()
        self.generator = generator()
        self.seeds = keras.random.SeedGenerator(5)
        self.d_tracker = keras.metrics.Mean(name="d_loss")
        self.g_tracker = keras.metrics.Mean(name="g_loss")
        self.of_loss = keras.losses.BinaryCrossentropy(from_logits=True)
        self.built = True

    @property
    def metrics(self) -> list[Any]:
        return [self.d_tracker, self.g_tracker]

    def compile(self, optimizer: Any, g_optimizer: Any, **settings: Any) -> None:
        optimizer.build(self.discriminator.trainable_variables)
        g_optimizer.build(self.generator.trainable_variables)
        super().compile(optimizer, loss=None)
        self.g_optimizer = g_optimizer
        self.g_optimizer_variables = list(g_optimizer.variables)

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, others, optimizer, metrics = state
        (real, kinds), _, _ = keras.utils.unpack_x_y_sample_weight(data)
        pictures_of = self.generator
        kept = len(self.generator.trainable_variables)
        of_d = len(self.discriminator.trainable_variables)
        d_variables = trainable[:of_d]
        g_variables = trainable[of_d : of_d + kept]
        at = {variable.path: place for place, variable in enumerate(self.non_trainable_variables)}
        places = [at[variable.path] for variable in self.g_optimizer_variables]
        seed = at[self.seeds.state.path]
        with keras.StatelessScope(state_mapping=[(self.seeds.state, others[seed])]) as scope:
            noise = [keras.random.normal((ops.shape(real)[0], LATENT), seed=self.seeds) for _ in range(2)]
        latent = [ops.concatenate([each, kinds], axis=1) for each in noise]

        def d_lost(d_variables: Any) -> Any:
            fake, _ = pictures_of.stateless_call(g_variables, [], latent[0])
            displayed = ops.concatenate([with_kinds(fake, kinds), with_kinds(real, kinds)], axis=0)
            reference = ops.concatenate([ops.ones((len(fake), 1)), ops.zeros((len(real), 1))], axis=0)
            answered, _ = self.discriminator.stateless_call(d_variables, [], displayed)
            return self.of_loss(reference, answered)

        def g_lost(g_variables: Any) -> Any:
            fake, _ = pictures_of.stateless_call(g_variables, [], latent[1])
            answered, _ = self.discriminator.stateless_call(d_variables, [], with_kinds(fake, kinds))
            return self.of_loss(ops.zeros((len(fake), 1)), answered)

        d_loss, gradients = jax.value_and_grad(d_lost)(d_variables)
        d_variables, optimizer = self.optimizer.stateless_apply(optimizer, gradients, d_variables)
        g_loss, gradients = jax.value_and_grad(g_lost)(g_variables)
        g_state = [others[place] for place in places]
        g_variables, g_state = self.g_optimizer.stateless_apply(g_state, gradients, g_variables)
        new = dict(zip(places, g_state, strict=True)) | {seed: scope.get_current_value(self.seeds.state)}
        others = [new.get(place, value) for place, value in enumerate(others)]
        logs, metrics = counted(self.metrics, metrics, (d_loss,), (g_loss,))
        return logs, ([*d_variables, *g_variables], others, optimizer, metrics)


class Watched(keras.callbacks.Callback):
    """Draws pictures behind each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[np.ndarray] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        latent = np.linspace(-1, 1, 2 * (LATENT + KINDS), dtype=np.float32).reshape(2, -1)
        self.drawn.append(self.model.generator.predict(latent, verbose=0))


def gan_used(model: Any) -> Any:
    watched = Watched()
    logs = model.fit((REAL, REAL_KINDS), batch_size=BATCH, epochs=2, verbose=0, callbacks=[watched]).history
    return dict(sorted(logs.items())), watched.drawn


def gan_in_turns() -> keras.Model:
    """The generator with the discriminator behind it, which is frozen while the generator learns."""
    judge = discriminator(1)
    draws = generator(LATENT)
    judge.compile(keras.optimizers.Adam(1e-3, beta_1=0.5), keras.losses.BinaryCrossentropy(from_logits=True))
    judge.trainable = False
    latent = keras.Input((LATENT,))
    return keras.Model(latent, judge(draws(latent)))


def turns_used(model: Any) -> Any:
    judge = model.get_layer("discriminator")
    draws = model.get_layer("generator")
    rng = np.random.default_rng(3)
    losses = []
    for first in (0, BATCH, 0):
        real = REAL[first : first + BATCH]
        fake = draws.predict(rng.standard_normal((BATCH, LATENT)).astype(np.float32), verbose=0)
        judge.trainable = True
        losses.append(judge.train_on_batch(real, np.ones((BATCH, 1), np.float32)))
        losses.append(judge.train_on_batch(fake, np.zeros((BATCH, 1), np.float32)))
        judge.trainable = False
        latent = rng.standard_normal((BATCH, LATENT)).astype(np.float32)
        losses.append(model.train_on_batch(latent, np.ones((BATCH, 1), np.float32)))
    return losses, draws.predict_on_batch(latent), judge.test_on_batch(real, np.ones((BATCH, 1), np.float32))
