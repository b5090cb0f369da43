"""A BERT student as transformers' `DistilBertForMaskedLM`: the same function under other names.

DistilBERT (Sanh et al. 2019, section 2) is BERT without token types and pooler. A student that has
only seen token type 0 adds that row of the table to every position, so it moves into the position
embeddings.
"""

import re

import transformers

_NAMES = (
    (r"bert\.embeddings\.", "distilbert.embeddings."),
    (r"bert\.encoder\.layer\.", "distilbert.transformer.layer."),
    (r"\.attention\.self\.query\.", ".attention.q_lin."),
    (r"\.attention\.self\.key\.", ".attention.k_lin."),
    (r"\.attention\.self\.value\.", ".attention.v_lin."),
    (r"\.attention\.output\.dense\.", ".attention.out_lin."),
    (r"\.attention\.output\.LayerNorm\.", ".sa_layer_norm."),
    (r"\.intermediate\.dense\.", ".ffn.lin1."),
    (r"(layer\.\d+)\.output\.dense\.", r"\1.ffn.lin2."),
    (r"(layer\.\d+)\.output\.LayerNorm\.", r"\1.output_layer_norm."),
    (r"cls\.predictions\.transform\.dense\.", "vocab_transform."),
    (r"cls\.predictions\.transform\.LayerNorm\.", "vocab_layer_norm."),
    (r"cls\.predictions\.decoder\.", "vocab_projector."),
)
_EPS = 1e-12  # of all of DistilBERT's norms
_ACTIVATIONS = ("gelu", "relu")


def why_not_distilbert(config: transformers.BertConfig) -> str | None:
    """What of a BERT cannot be a DistilBERT."""
    if config.layer_norm_eps != _EPS:
        return f"layer_norm_eps is {config.layer_norm_eps}, DistilBERT's is {_EPS}"
    if config.hidden_act not in _ACTIVATIONS:
        return f"hidden_act is {config.hidden_act}, DistilBERT knows {' and '.join(_ACTIVATIONS)}"
    return None


def as_distilbert(model: transformers.BertForMaskedLM) -> transformers.DistilBertForMaskedLM:
    """The DistilBERT with the logits of a BERT whose token types are all 0.

    Args:
        model: of which `why_not_distilbert` has nothing to say.

    Returns:
        On the CPU, in evaluation mode.
    """
    bert = model.config
    config = transformers.DistilBertConfig(
        vocab_size=bert.vocab_size,
        max_position_embeddings=bert.max_position_embeddings,
        n_layers=bert.num_hidden_layers,
        n_heads=bert.num_attention_heads,
        dim=bert.hidden_size,
        hidden_dim=bert.intermediate_size,
        dropout=bert.hidden_dropout_prob,
        attention_dropout=bert.attention_probs_dropout_prob,
        activation=bert.hidden_act,
        initializer_range=bert.initializer_range,
        pad_token_id=bert.pad_token_id,
        tie_word_embeddings=bert.tie_word_embeddings,
    )
    weights = {_renamed(name): p.detach().cpu() for name, p in model.state_dict().items()}
    types = weights.pop("distilbert.embeddings.token_type_embeddings.weight")
    positions = "distilbert.embeddings.position_embeddings.weight"
    weights[positions] = weights[positions] + types[0]
    weights = {name: w for name, w in weights.items() if not name.startswith(("bert.", "cls."))}
    distilbert = transformers.DistilBertForMaskedLM(config).to(types.dtype)
    distilbert.load_state_dict(weights)
    return distilbert.eval()


def _renamed(name: str) -> str:
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name
