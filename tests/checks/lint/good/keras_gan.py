"""A GAN of Keras: only the discriminator has a layer with a mode."""

import keras
import torch
from keras import layers

discriminator = keras.Sequential(
    [
        keras.Input(shape=(28, 28, 1)),
        layers.Conv2D(64, (3, 3), strides=(2, 2), padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Dropout(0.2),
        layers.GlobalMaxPooling2D(),
        layers.Dense(1),
    ],
    name="discriminator",
)
generator = keras.Sequential(
    [
        keras.Input(shape=(128,)),
        layers.Dense(7 * 7 * 128),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Reshape((7, 7, 128)),
        layers.Conv2DTranspose(128, (4, 4), strides=(2, 2), padding="same"),
        layers.Conv2D(1, (7, 7), padding="same", activation="sigmoid"),
    ],
    name="generator",
)
d_optimizer = keras.optimizers.Adam(learning_rate=0.0003)
g_optimizer = keras.optimizers.Adam(learning_rate=0.0004)
loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
augment = keras.Sequential([layers.RandomFlip("horizontal"), layers.RandomRotation(0.1)])
dataset = [torch.rand(64, 28, 28, 1)]

for real_images in dataset:
    real = augment(real_images)
    generated = generator(torch.randn(64, 128))
    combined = torch.concat([generated, real], axis=0)
    discriminator.zero_grad()
    d_loss = loss_fn(torch.ones(2), discriminator(combined, training=True))
    d_loss.backward()
    grads = [v.value.grad for v in discriminator.trainable_weights]
    with torch.no_grad():
        d_optimizer.apply(grads, discriminator.trainable_weights)
    generator.zero_grad()
    g_loss = loss_fn(torch.zeros(2), discriminator(generator(torch.randn(64, 128)), training=True))
    g_loss.backward()
    with torch.no_grad():
        grads = [v.value.grad for v in generator.trainable_weights]
        g_optimizer.apply(grads, generator.trainable_weights)
