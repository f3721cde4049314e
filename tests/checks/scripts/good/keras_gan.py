"""A GAN of Keras: only the discriminator has a layer with a mode."""

import keras
import torch
from keras import layers

flat = layers.Flatten()
discriminator = keras.Sequential([flat, layers.LeakyReLU(), layers.Dropout(0.2), layers.Dense(1)])
generator = keras.Sequential([layers.Dense(28 * 28), layers.Reshape((28, 28, 1))])
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
