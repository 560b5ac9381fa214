"""Step 7: weights of 8 and 4 bits."""

import numpy as np
from step_1 import Model, decode, encode, generate, load

GROUP = 16


def quantise(weight, bits):
    """Round a matrix [N, K]; return codes [N, K] as int8 and scales [N, K / GROUP].

    A weight is about code * scale. Each group of neighbouring inputs has a scale.
    """
    groups = weight.reshape(len(weight), -1, GROUP)
    scales = np.abs(groups).max(-1) / (2 ** (bits - 1) - 1)
    divisors = np.where(scales == 0, 1, scales)
    codes = np.rint(groups / divisors[..., None]).astype(np.int8)
    return codes.reshape(weight.shape), scales


def product(x, codes, scales):
    """Return x [T, K] times the weights [N, K], as [T, N], without storing the weights."""
    groups = codes.reshape(len(codes), -1, GROUP).transpose(1, 2, 0)
    sums = x.reshape(len(x), -1, GROUP).transpose(1, 0, 2) @ groups
    return (sums * scales.T[:, None]).sum(0)


class QuantisedModel(Model):
    """A model with rounded matrices in its layers. Embeddings and norms stay as they are."""

    def __init__(self, model, bits):
        super().__init__(model.config, {})
        self.packed = {}
        for name, weight in model.weights.items():
            if name.endswith("_proj.weight"):
                self.packed[name] = quantise(weight, bits)
            else:
                self.weights[name] = weight

    def linear(self, x, name):
        return product(x, *self.packed[name + ".weight"])


def dequantise(codes, scales):
    """Return the weights [N, K] that codes and scales stand for."""
    return (codes.reshape(*scales.shape, GROUP) * scales[..., None]).reshape(codes.shape)


if __name__ == "__main__":
    model = load()
    prompt = encode("Once there was a fox named Ruby")
    print(f"float: {decode(generate(model, prompt, 16))}")
    for bits in (8, 4):
        small = QuantisedModel(model, bits)
        print(f"int{bits}:  {decode(generate(small, prompt, 16))}")
        name = "model.layers.0.mlp.up_proj.weight"
        error = np.abs(dequantise(*small.packed[name]) - model.weights[name]).max()
        print(f"       largest error of a weight: {error:.4f}")
