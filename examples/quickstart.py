"""Six clients with two kinds of clothes each; clients 0 and 1, 2 and 3, 4 and 5 share theirs."""

import numpy as np
from torch import nn

import pfedla

data = pfedla.load_dataset("fashion-mnist-10k")  # embedded; any (x, y) will do
clients = []
for i in range(6):
    mine = np.flatnonzero(np.isin(data.y, (i // 2, i // 2 + 5)))[i % 2 :: 2][:150]
    clients.append((data.x[mine], data.y[mine]))


def make_model() -> nn.Module:
    """Return the common first model: any torch module."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


result = pfedla.run(pfedla.PFedLA(retain=1), make_model, clients, rounds=30)
print(f"accuracy {result.summary['accuracy_mean']:.3f}, worst client {result.summary['accuracy_worst']:.3f}")
assert result.alpha is not None
print("whom client 0 learns its last layer from:", result.alpha[-1, 0, -1].round(2))
model = result.model(3)  # client 3's own model, ready to use
