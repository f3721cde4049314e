"""Two Keras models: the student learns, the teacher does not."""

import keras
import torch


def student_model(width=32):
    hidden = keras.layers.Dense(width)
    return keras.Sequential([hidden, keras.layers.Dropout(0.1), keras.layers.Dense(10)])


def teacher_model():
    inputs = keras.Input((784,))
    x = keras.layers.BatchNormalization()(keras.layers.Dense(512)(inputs))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


class Distiller:
    def __init__(self, student, teacher, alpha=0.1):
        self.student, self.teacher, self.alpha = student, teacher, alpha
        self.optimizer = torch.optim.Adam(student.parameters())
        self.kl = keras.losses.KLDivergence()
        self.ce = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def fit(self, loader):
        for x, y in loader:
            self.optimizer.zero_grad()
            soft = self.teacher(x)
            hard = self.student(x, training=True)
            loss = self.alpha * self.ce(y, hard) + self.kl(soft, hard)
            loss.backward()
            self.optimizer.step()


Distiller(student_model(), teacher_model()).fit([(torch.rand(8, 784), torch.zeros(8))])
