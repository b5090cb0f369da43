"""What DeBERTa is pretrained with: the enhanced mask decoder of a masked-LM model (He et al. 2020,
section 3.2), and the discriminator of replaced-token detection (He et al. 2021, "DeBERTaV3").

transformers has neither. Weights have the names of the published checkpoints, which it passes over
(`mask_predictions`, `position_embeddings`), so that what is saved here loads there as the model, or
the masked-LM head without its decoder, and what is published begins a training here.

Letters: B batch, S padded length, T packed rows, C hidden.
"""

import torch
import transformers
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm
from transformers.models.electra.modeling_electra import ElectraForPreTrainingOutput

from fastbert import dispatch
from fastbert.encoder import add_norm, is_plain_linear, is_plain_norm, is_unhooked
from fastbert.models.deberta import DebertaForMaskedLM
from fastbert.models.deberta_v2 import DebertaV2ForMaskedLM
from fastbert.models.detection import DetectionHead, replaced_loss
from fastbert.models.linears import own_linear
from fastbert.models.packed import gelu_form
from fastbert.models.signature import transformers_signature
from fastbert.ops.linear_gelu import linear_gelu
from fastbert.padding import restarting_positions

# --- generator ------------------------------------------------------------------------------------


class EnhancedMaskDecoder:
    """Base of a masked-LM head, before the family's: its last layer is the enhanced mask decoder.

    The last layer runs twice with keys and values from the layer below it, H: with queries from H
    and embeddings of absolute positions, which nothing below has seen, then with queries from its
    own output, to which the residual connection belongs, too. The logits are of the second output.
    Beside the arguments of the family's head:

    Args:
        last_layer_rows: `(R,)` int64, packed rows that the decoder computes, rising; others come
            out as 0. None: all.

    Raises:
        ValueError: positions are part of the input already (`config.position_biased_input`), or a
            convolution behind the only layer.
        NotImplementedError: a call that the packed forward cannot take.
    """

    def __init__(self, config):
        if config.position_biased_input:
            raise ValueError(
                "config.position_biased_input is True: absolute positions are in the input, the "
                "enhanced mask decoder adds them at the last layer; set it to False, or use the "
                "masked-LM head without the decoder"
            )
        if config.num_hidden_layers == 1 and getattr(config, "conv_kernel_size", 0) > 0:
            raise ValueError(
                "config.num_hidden_layers is 1: the enhanced mask decoder takes the only layer's "
                "place, and config.conv_kernel_size asks for a convolution behind it; use two "
                "layers, or no convolution"
            )
        super().__init__(config)
        table = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self._init_weights(table)
        self.deberta.embeddings.position_embeddings = table
        self.deberta.enhanced_decoding = True


class DebertaV2ForEnhancedMaskedLM(EnhancedMaskDecoder, DebertaV2ForMaskedLM):
    """`fastbert.DebertaV2ForMaskedLM` with the enhanced mask decoder, the generator of DeBERTaV3;
    arguments and errors as `EnhancedMaskDecoder` has them."""


class DebertaForEnhancedMaskedLM(EnhancedMaskDecoder, DebertaForMaskedLM):
    """`fastbert.DebertaForMaskedLM` with the enhanced mask decoder; arguments and errors as
    `EnhancedMaskDecoder` has them."""


# --- discriminator --------------------------------------------------------------------------------


class DetectionPredictions(nn.Module):
    """logits = classifier(act(dense(LayerNorm(x + x_first)))), x_first each text's first token.

    Args:
        config: of the model.
        norm_type: the family's LayerNorm.
    """

    def __init__(self, config, norm_type: type):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.LayerNorm = norm_type(config.hidden_size, config.layer_norm_eps)
        self.classifier = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden_states: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """`(...)` logits of hidden states `(..., C)` and the first tokens', broadcastable."""
        summed = self.LayerNorm(hidden_states + first)
        return self.classifier(self.activation(self.dense(summed)))[..., 0]

    def are_plain(self) -> bool:
        """Whether the head may be fused."""
        return (
            is_unhooked(self)
            and gelu_form(self.activation) is not None
            and is_plain_norm(self.LayerNorm)
            and is_plain_linear(self.dense)
            and is_plain_linear(self.classifier)
        )


class _PlainDetection:
    """A discriminator in plain PyTorch, on the model that transformers' class builds.

    Attributes:
        model_type, norm_type: the family's.
    """

    model_type: type
    norm_type: type

    def __init__(self, config):
        super().__init__(config)
        self.deberta = self.model_type(config)
        self.mask_predictions = DetectionPredictions(config, self.norm_type)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs,
    ) -> ElectraForPreTrainingOutput | tuple:
        outputs = self.deberta(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        hidden_states = outputs.last_hidden_state
        first = first_tokens(hidden_states, attention_mask)
        logits = self.mask_predictions(hidden_states, first)
        result = ElectraForPreTrainingOutput(
            loss=None if labels is None else replaced_loss(logits, labels, attention_mask),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return result if return_dict else result.to_tuple()


def first_tokens(hidden_states: torch.Tensor, attention_mask) -> torch.Tensor:
    """`(B, 1, C)`: hidden states `(B, S, C)` of each text's first token that is no padding."""
    if attention_mask is None:
        return hidden_states[:, :1]
    first = (attention_mask != 0).int().argmax(1).to(hidden_states.device)
    return hidden_states.gather(1, first[:, None, None].expand(-1, 1, hidden_states.shape[-1]))


class PlainDebertaV2Detection(_PlainDetection, transformers.DebertaV2PreTrainedModel):
    """The oracle of `DebertaV2ForPreTraining`, and what is traced in its place."""

    model_type = transformers.DebertaV2Model
    norm_type = nn.LayerNorm


class PlainDebertaDetection(_PlainDetection, transformers.DebertaPreTrainedModel):
    """The same for `DebertaForPreTraining`."""

    model_type = transformers.DebertaModel
    norm_type = DebertaLayerNorm


class DisentangledDetectionHead(DetectionHead):
    """The fused forward of the discriminators of all versions."""

    def token_scores(self, outputs, attention_mask):
        batch, rows = outputs.__dict__.get("packed", (None, None))
        head = self.mask_predictions
        if rows is None:
            hidden_states = outputs.last_hidden_state
            return head(hidden_states, first_tokens(hidden_states, attention_mask))
        own = restarting_positions(batch.cu_seqlens_q, batch.num_rows)[0]
        first = torch.arange(batch.num_rows, device=own.device) - own
        # A lookup: of repeated rows its gradient adds up, in the same order every time.
        return batch.pad(self._scores(rows, nn.functional.embedding(first, rows)))

    def _scores(self, rows: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """`(T,)` of hidden rows `(T, C)` and those of the first tokens."""
        head = self.mask_predictions
        if dispatch.is_symbolic(rows) or not head.are_plain():
            return head(rows, first)
        summed = add_norm(first, rows, None, head.LayerNorm, 0, None)
        form, dense, classifier = gelu_form(head.activation), head.dense, head.classifier
        activated = linear_gelu(summed, dense.weight, dense.bias, approximate=form)
        cache = self.weight_cache
        return own_linear(activated, classifier.weight, classifier.bias, cache=cache)[..., 0]


class DebertaV2ForPreTraining(DisentangledDetectionHead, PlainDebertaV2Detection):
    """A DeBERTa-v2 or -v3 that says of every token whether it was replaced: the discriminator of
    DeBERTaV3, which transformers has no class for.

    Arguments, loss and output as `fastbert.ElectraForPreTraining`; logits are 0 at padding.
    """


class DebertaForPreTraining(DisentangledDetectionHead, PlainDebertaDetection):
    """The same on the first DeBERTa."""


for _plain, _ours in (
    (PlainDebertaV2Detection, DebertaV2ForPreTraining),
    (PlainDebertaDetection, DebertaForPreTraining),
):
    _ours.forward = transformers_signature(_plain)(_ours.forward)
