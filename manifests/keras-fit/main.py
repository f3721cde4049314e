"""Handwritten digits: a convolutional Keras model, trained by all replicas with model.fit."""

import keras
from keras import layers
from sklearn.datasets import load_digits

from k8sjob import runtime


def digits():
    """1500 images to train with and 297 to test with; they come with scikit-learn."""
    data = load_digits()
    images, labels = data.images[..., None].astype("float32"), data.target
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def build():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Rescaling(1 / 16),
            layers.Conv2D(12, kernel_size=3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Conv2D(24, kernel_size=3, strides=2, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dropout(0.3),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


with runtime.session(seed=1) as job:
    train, test = digits()
    model = build()
    job.fit(
        model,
        train,
        epochs=6,
        global_batch=64,
        validation=test,
        callbacks=[keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=1)],
    )
    if job.checkpoint_dir:
        job.save_model(model, job.checkpoint_dir / "digits.keras")
