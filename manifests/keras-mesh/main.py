"""Handwritten digits: a wide Keras network whose layers the job.yaml divides over the ranks."""

import keras
from keras import layers
from sklearn.datasets import load_digits

from k8sjob import runtime


def digits():
    """1500 images to train with and 297 to test with; they come with scikit-learn."""
    data = load_digits()
    images, labels = (data.data / 16).astype("float32"), data.target
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def build():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(512, activation="relu", name="up"),
            layers.Dropout(0.2),
            layers.Dense(64, activation="tanh", name="down"),
            layers.Dense(10, name="out"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.AdamW(2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


with runtime.session(seed=1) as job:
    train, test = digits()
    model = build()  # inside the session: that is where its variables are divided
    job.fit(model, train, epochs=5, global_batch=64, validation=test)
    if job.checkpoint_dir:
        job.save_model(model, job.checkpoint_dir / "digits.keras")
