"""The demo's model: a small character-level transformer, and the low-rank adapters of its
fine-tune."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo.text import CONTEXT, VOCABULARY

WIDTH = 128
HEADS = 4
LAYERS = 4
RANK = 4


class Block(nn.Module):
    """Attention to what came before, then a two-layer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, WIDTH) to the same."""
        x = x + self.out(self._attend(self.norm1(x)))
        change: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + change

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, WIDTH)


class CharacterModel(nn.Module):
    """Predicts the next character. The output layer shares the embedding's memory, as real models
    do: a tied weight is stored once."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.characters.weight

    def forward(self, text: Tensor) -> Tensor:
        """(batch, length) of character numbers to (batch, length, VOCABULARY) of logits."""
        x = self.characters(text) + self.positions(torch.arange(text.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class LowRank(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices (Hu et al. 2021,
    arXiv:2106.09685)."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(RANK, frozen.in_features) / frozen.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(frozen.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        frozen: Tensor = self.frozen(x)
        return frozen + x @ self.a.T @ self.b.T


def add_adapters(model: CharacterModel) -> list[nn.Parameter]:
    """Freeze the model, put an adapter around every linear layer of its blocks, and return what is
    left to train."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, LowRank(getattr(block, name)))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def loss_of(model: CharacterModel, text: Tensor, following: Tensor) -> Tensor:
    """Mean cross-entropy per character, in nats."""
    return functional.cross_entropy(model(text).flatten(0, 1), following.flatten())
