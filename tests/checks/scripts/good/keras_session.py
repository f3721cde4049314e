"""Keras in k8sjob's session: its fit is that of all ranks."""

import keras
import numpy as np

from k8sjob import runtime


def train(job):
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(2)])
    model.compile(optimizer="adam", loss="mse")
    job.fit(model, (np.zeros((8, 8)), np.zeros((8, 2))), epochs=1, global_batch=8)


with runtime.session() as here:
    train(here)
    other = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(2)])
    other.compile(optimizer="adam", loss="mse")
    here.fit(other, (np.zeros((8, 8)), np.zeros((8, 2))), epochs=1, global_batch=8)
