"Small random and constant models for tests."
import torch
from torch import nn

from rlworkbench.policies import build_tokenizer, tiny_model

LETTERS = list("abcdefghij 0123456789=+:;\n")


def random_model(vocab=19, width=64, layers=2, context=256, seed=0):
    "A model with opinions that depend on the whole context: fresh weights hardly look at it, a tied head repeats the last token."
    torch.manual_seed(seed)
    model = tiny_model(vocab, width=width, layers=layers, context=context).eval()
    model.lm_head = nn.Linear(width, vocab)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2: p *= 4
    return model


def constant_model(logits, context=256):
    "A model that says the same everywhere."
    model = tiny_model(len(logits), width=32, layers=1, context=context).eval()
    model.lm_head = nn.Linear(32, len(logits))
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.copy_(torch.tensor(logits))
    return model


def letters(): return build_tokenizer(LETTERS, "letters")
