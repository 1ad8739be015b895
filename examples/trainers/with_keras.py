# SPDX-License-Identifier: Apache-2.0
"""Keras 3 with torch as its backend. Its optimizers are its own, not torch's; each `apply` is a step."""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported
import keras
import numpy as np


def main() -> None:
    keras.utils.set_random_seed(0)
    numbers = np.random.default_rng(0)
    model = keras.Sequential([keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss)
    features = numbers.standard_normal((64, 64), dtype=np.float32)
    history = model.fit(features, numbers.integers(10, size=64), batch_size=16, epochs=4, verbose=0)
    for value in history.history["loss"]:
        print(f"loss {value:.6f}")


if __name__ == "__main__":
    main()
