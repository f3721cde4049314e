"""Models of Keras that the programs train; what is in a case, see there."""

from threading import Lock

import keras
from cases import LENGTH
from cases import text as prose
from keras import layers


def dense(case):
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(
                32,
                name="fc1",
                activation="tanh",
                kernel_regularizer=case["penalty"],
                kernel_constraint=case["constraint"],
            ),
            layers.Dropout(case["dropout"], seed=5),
            layers.Dense(10, name="fc2"),
        ]
    )


def conv(case):
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(case["dropout"], seed=5),
            layers.Dropout(case["dropout"]),
            layers.Dense(10),
        ]
    )


def text_model(case):
    """(windows, letters) of a transformer of one block; causal attention tells places apart."""
    _, letters = prose()
    window = keras.Input((LENGTH,), dtype="int64")
    x = layers.Embedding(letters, 32)(window)
    attention = layers.MultiHeadAttention(4, 8, dropout=case["dropout"], seed=5)
    x = layers.LayerNormalization()(x + attention(x, x, use_causal_mask=True))
    up, down = layers.Dense(64, activation="gelu", name="up"), layers.Dense(32, name="down")
    x = layers.LayerNormalization()(x + down(up(x)))
    return window, layers.Dense(letters)(x)


def named(_):
    """A model of two inputs, which are given by name."""
    left, right = keras.Input((64,), name="left"), keras.Input((64,), name="right")
    mixed = layers.Add()([layers.Dense(16)(left), layers.Dense(16)(right)])
    return keras.Model({"left": left, "right": right}, layers.Dense(10)(layers.ReLU()(mixed)))


def shared(_):
    """One layer in two places."""
    images, again = keras.Input((8, 8, 1)), layers.Dense(64, activation="tanh", name="fc1")
    outputs = layers.Dense(10, name="fc2")
    return keras.Model(images, outputs(again(again(layers.Flatten()(images)))))


def guarded():
    """A loss of Keras that nothing can pickle."""
    lock = Lock()

    def loss(labels, outputs):
        with lock:
            return keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)

    return loss
