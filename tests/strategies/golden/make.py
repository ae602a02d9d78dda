"""Makes powersgd.json: 40 steps of two replicas with PowerSGD, in NumPy and float64 (arXiv 1905.13727, algorithm 1).

    python tests/strategies/golden/make.py

Nothing of the toolkit, Keras or TensorFlow is used. The network is linear, 12 -> 16 -> 12 with biases, the loss a mean
of squares. The target has rank 3 and singular values far apart: between near ones, factors of float32 turn by chance.
"""

import json
import pathlib

import numpy as np

RANK, REPLICAS, BATCH, EPOCHS, RATE, MOMENTUM = 2, 2, 8, 10, 0.002, 0.5
SHAPES = [(12, 16), (16,), (16, 12), (12,)]
KERNELS = [0, 2]


def orthonormal(matrix):
    columns = []
    for given in matrix.T:
        column = given - sum((other @ given) * other for other in columns)
        columns.append(column / (np.linalg.norm(column) + 1e-8))
    return np.array(columns).T


def gradients(weights, x, y):
    first, bias, second, last = weights
    hidden = x @ first + bias
    above = 2 * (hidden @ second + last - y) / y.size
    below = above @ second.T
    return [x.T @ below, below.sum(0), hidden.T @ above, above.sum(0)]


def step(weights, x, y, right, unsent):
    """Returns all replicas' mean of gradients, which have as many examples each; sets factors and what is left."""
    share = len(x) // REPLICAS
    each = [gradients(weights, x[r * share :][:share], y[r * share :][:share]) for r in range(REPLICAS)]
    mean = [sum(of) / REPLICAS for of in zip(*each, strict=True)]
    for number in KERNELS:
        corrected = [each[r][number] / REPLICAS + unsent[r][number] for r in range(REPLICAS)]
        start = orthonormal(right[number])
        left = orthonormal(sum(matrix @ start for matrix in corrected))
        right[number] = sum(matrix.T @ left for matrix in corrected)
        mean[number] = left @ right[number].T
        for r in range(REPLICAS):
            unsent[r][number] = corrected[r] - mean[number] / REPLICAS
    return mean


def main():
    random = np.random.default_rng(5)
    weights = [random.normal(size=shape) * 0.3 for shape in SHAPES]
    x = random.normal(size=(32, 12))
    bases = [np.linalg.qr(random.normal(size=(12, 3)))[0] for _ in range(2)]
    y = x @ bases[0] @ np.diag([9.0, 3.0, 1.0]) @ bases[1].T
    right = {number: random.normal(size=(SHAPES[number][1], RANK)) for number in KERNELS}
    golden = {"batch": BATCH, "epochs": EPOCHS, "x": x.tolist(), "y": y.tolist()}
    golden |= {"begin": [each.tolist() for each in weights], "right": [right[number].tolist() for number in KERNELS]}
    velocity = [np.zeros(shape) for shape in SHAPES]
    unsent = [{number: np.zeros(SHAPES[number]) for number in KERNELS} for _ in range(REPLICAS)]
    for _ in range(EPOCHS):
        for begin in range(0, len(x), BATCH):
            mean = step(weights, x[begin:][:BATCH], y[begin:][:BATCH], right, unsent)
            velocity = [MOMENTUM * v - RATE * g for v, g in zip(velocity, mean, strict=True)]
            weights = [w + v for w, v in zip(weights, velocity, strict=True)]
    golden["end"] = [each.tolist() for each in weights]
    (pathlib.Path(__file__).parent / "powersgd.json").write_text(json.dumps(golden))


if __name__ == "__main__":
    main()
