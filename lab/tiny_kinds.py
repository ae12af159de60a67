"""Write tiny models with random weights that do not complete text: an embedder and two classifiers.

A few weights of the reranker let texts with the letters of `RANKED` get a higher score.

Contract: like `tiny_model`, whose tokenizer and random weights these models use. They are BERT with
two layers, which vLLM runs without code of the model. The embedder has the files of
sentence-transformers: its `modules.json` computes the mean over the tokens, and normalises it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

from lab import tiny_model

Kind: TypeAlias = Literal["embed", "rerank", "classify"]

HIDDEN = tiny_model.HIDDEN
INTERMEDIATE = tiny_model.INTERMEDIATE
LAYERS = 2
HEADS = 4
CONTEXT = 512  # tokens: a row of the positions' table each
LABELS: dict[Kind, tuple[str, ...]] = {
    "rerank": ("LABEL_0",),
    "classify": ("refund", "delivery", "other"),
}
RANKED = "FP"
"""
Letters that the reranker scores. The correct text in `questions.DOCUMENTS` has both letters, and
the other text has none.
"""
MODULES = (
    ("", "sentence_transformers.models.Transformer"),
    ("1_Pooling", "sentence_transformers.models.Pooling"),
    ("2_Normalize", "sentence_transformers.models.Normalize"),
)


def write(directory: Path, kind: Kind) -> Path:
    """Write the checkpoint to `directory`, readable by all, and return its path."""
    documents: dict[str, object] = {
        "config.json": config(kind),
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {
            **tiny_model.tokenizer_config(),
            "model_max_length": CONTEXT,
            "chat_template": None,
        },
    }
    if kind == "embed":
        documents["modules.json"] = [
            {"idx": at, "name": str(at), "path": path, "type": type_}
            for at, (path, type_) in enumerate(MODULES)
        ]
        documents["1_Pooling/config.json"] = {
            "word_embedding_dimension": HIDDEN,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": True,
        }
    return tiny_model.write_checkpoint(directory, documents, tensors(kind))


def config(kind: Kind) -> dict[str, object]:
    """Return the model's `config.json`."""
    labels = LABELS.get(kind, ())
    return {
        "architectures": ["BertForSequenceClassification" if labels else "BertModel"],
        "model_type": "bert",
        "dtype": "bfloat16",
        "vocab_size": tiny_model.VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "hidden_act": "gelu",
        "max_position_embeddings": CONTEXT,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 3,
        "position_embedding_type": "absolute",
        **(
            {
                "id2label": {str(at): name for at, name in enumerate(labels)},
                "label2id": {name: at for at, name in enumerate(labels)},
            }
            if labels
            else {}
        ),
    }


def tokenizer() -> dict[str, object]:
    """
    Return the tiny Llama's tokenizer, which also marks the start, the end and the second text.
    """
    start, end = ({"SpecialToken": {"id": name, "type_id": 0}} for name in ("<s>", "</s>"))
    first, second = ({"Sequence": {"id": name, "type_id": at}} for at, name in enumerate("AB"))
    after = {"SpecialToken": {"id": "</s>", "type_id": 1}}
    return {
        **tiny_model.tokenizer(),
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, first, end],
            "pair": [start, first, end, second, after],
            "special_tokens": {
                name: {"id": name, "ids": [number], "tokens": [name]}
                for number, name in enumerate(tiny_model.SPECIALS)
                if name in {"<s>", "</s>"}
            },
        },
    }


def tensors(kind: Kind) -> Iterator[tiny_model.Tensor]:
    """Yield the model's tensors."""
    prefix = "bert." if kind in LABELS else ""
    shapes = [(prefix + name, shape) for name, shape in _shapes()]
    if kind in LABELS:
        shapes += tiny_model.linear("classifier", len(LABELS[kind]), HIDDEN)
    found = tiny_model.drawn(shapes)
    yield from map(_ranking, found) if kind == "rerank" else found


def _ranking(tensor: tiny_model.Tensor) -> tiny_model.Tensor:
    """
    Return a tensor of the reranker: the first number of a state counts the letters of `RANKED`.

    Only the embeddings of these letters have a non-zero first number. The first layer computes its
    mean over all tokens, and pooler and classifier score this mean: 0.1 and 0.8 for
    `questions.DOCUMENTS`.
    """
    name, shape, values = tensor
    _, columns = (*shape, 1)[:2]
    cells = [values[at : at + 2] for at in range(0, len(values), 2)]
    zero, one = tiny_model.bfloat16(0.0), tiny_model.bfloat16(1.0)
    if name.startswith("bert.embeddings.") and "Norm" not in name:
        cells[::columns] = [zero] * (len(cells) // columns)
        for letter in RANKED if "word" in name else "":
            cells[tiny_model.token(letter) * columns] = tiny_model.bfloat16(0.5)
    for ending, first in (
        ("layer.0.attention.self.value.weight", one),
        ("layer.0.attention.output.dense.weight", tiny_model.bfloat16(4.0)),
        ("pooler.dense.weight", one),
        ("classifier.weight", tiny_model.bfloat16(4.0)),
    ):
        if name.endswith(ending):
            cells[:columns] = [first, *[zero] * (columns - 1)]
    if name.endswith("pooler.dense.bias"):
        cells[0] = tiny_model.bfloat16(-1.125)
    return name, shape, b"".join(cells)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    rows = {"word": tiny_model.VOCABULARY, "position": CONTEXT, "token_type": 2}
    for name, count in rows.items():
        yield f"embeddings.{name}_embeddings.weight", (count, HIDDEN)
    yield from tiny_model.norm("embeddings.LayerNorm", HIDDEN)
    for layer in range(LAYERS):
        each = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            yield from tiny_model.linear(f"{each}.attention.self.{part}", HIDDEN, HIDDEN)
        yield from tiny_model.linear(f"{each}.attention.output.dense", HIDDEN, HIDDEN)
        yield from tiny_model.norm(f"{each}.attention.output.LayerNorm", HIDDEN)
        yield from tiny_model.linear(f"{each}.intermediate.dense", INTERMEDIATE, HIDDEN)
        yield from tiny_model.linear(f"{each}.output.dense", HIDDEN, INTERMEDIATE)
        yield from tiny_model.norm(f"{each}.output.LayerNorm", HIDDEN)
    yield from tiny_model.linear("pooler.dense", HIDDEN, HIDDEN)
