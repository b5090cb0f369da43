"""What the heads of all families share on a `PackedModel`.

Letters: B batch, S padded length, C hidden, V vocab, P labelled rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_outputs import MaskedLMOutput

from fastbert import dispatch
from fastbert.encoder import (
    add_norm,
    compute_dtype,
    is_ordinary,
    is_plain_linear,
    is_plain_norm,
    is_unhooked,
)
from fastbert.models.accelerate import swap_classes
from fastbert.models.inputs import check_label_dtype, check_labels, check_tensors
from fastbert.models.linears import own_linear, own_linears
from fastbert.models.loading import LoadsFolders
from fastbert.models.losses import IGNORE_INDEX, mean_loss, rescaled_loss
from fastbert.models.outputs import Deferred, LazyLogits, LazyMaskedLMOutput
from fastbert.models.packed import (
    HEAD_KEYWORDS,
    check_reach,
    gelu_form,
    is_plain_table,
    is_sharded,
    is_traced,
    is_transformed,
    pop_return_dict,
)
from fastbert.models.packed_model import PackedModel
from fastbert.ops.linear_gelu import linear_gelu
from fastbert.ops.mlm_cross_entropy import mlm_cross_entropy
from fastbert.ops.unpad import unpad
from fastbert.padding import check_mask_shape


class Head(LoadsFolders):
    """Base of every head, before transformers' class."""

    def __init__(self, config):
        super().__init__(config)
        swap_classes(self)

    def on_packed_model(self) -> bool:
        """Whether the model below is ours; a user's own keeps transformers' head."""
        return isinstance(self.base_model, PackedModel)

    def plain_forward(self) -> bool:
        """Whether transformers' forward of the head has to run."""
        return is_traced() or is_transformed() or not self.on_packed_model()

    def transformers_forward(self, inputs: dict):
        """What the class behind ours gives, which does not know the keywords of our heads."""
        return super().forward(**{k: v for k, v in inputs.items() if k not in HEAD_KEYWORDS})

    def scores_of_rows(self, outputs, score: Callable[[torch.Tensor], torch.Tensor]):
        """`(B, S, V)`, `score` of each hidden state; every padded position has that of a zero
        hidden state.

        Args:
            outputs: of a model that was told to keep its rows.
            score: `(..., C)` to `(..., V)`.
        """
        batch, rows = outputs.__dict__.get("packed", (None, None))
        if rows is None or batch.indices is None or dispatch.is_symbolic(rows):
            return score(outputs.last_hidden_state)
        blank = score(rows.new_zeros(1, rows.shape[-1]))
        return batch.pad_with(score(rows), blank)


# --- heads that keep transformers' forward --------------------------------------------------------


class TaskHead(Head):
    """A head whose forward is transformers' own, on our model.

    What is added: the rows the head reads are computed where they are padding, and
    `num_items_in_batch` is the denominator of the loss.
    """

    def forward(self, **inputs):
        num_items_in_batch = inputs.pop("num_items_in_batch", None)
        return_dict = pop_return_dict(self.config, inputs)
        if not self.plain_forward():
            self._check_labels(inputs)
        if self.on_packed_model():
            inputs |= self.model_keywords(inputs)
        with own_linears(self):
            outputs = super().forward(return_dict=True, **inputs)
        self.finish_scores(outputs, inputs)
        labels = inputs.get("labels")
        if outputs.loss is not None and labels is not None:
            outputs.loss = rescaled_loss(outputs.loss, labels, num_items_in_batch)
        return outputs if return_dict else outputs.to_tuple()

    def _check_labels(self, inputs: dict) -> None:
        labels = inputs.get("labels")
        if labels is None:
            return
        check_tensors(labels=labels)
        num_classes = self.num_classes(inputs, labels)
        if num_classes is not None:
            check_labels(labels, num_classes)

    def num_classes(self, inputs: dict, labels: torch.Tensor) -> int | None:
        """Classes that `labels` choose from; None where they are numbers."""
        shape = tokens_shape(inputs)
        if shape is not None and len(shape) == 3:
            return shape[1]
        problem, count = self.config.problem_type, self.config.num_labels
        # As transformers guesses the problem.
        classes = count > 1 and labels.dtype in (torch.int64, torch.int32)
        if problem == "single_label_classification" or (problem is None and classes):
            return count
        return None

    def model_keywords(self, inputs: dict) -> dict:
        """What tells the model which rows the head reads."""
        return {"required_rows": self.rows_read(inputs)}

    def rows_read(self, inputs: dict) -> torch.Tensor | None:
        """`(B, S)` bool of positions read although they may be padding."""
        return None

    def finish_scores(self, outputs, inputs: dict) -> None:
        """Changes in `outputs` what transformers' head makes of rows that were not computed."""


class FirstTokenHead(TaskHead):
    """A head that reads position 0 of each text, or `pooled_rows` of packed input."""

    def model_keywords(self, inputs):
        return {"first_only": True}


class TokenClassificationHead(TaskHead):
    """A head with a label a token; one on padding counts, as in transformers."""

    def num_classes(self, inputs, labels):
        return self.config.num_labels

    def rows_read(self, inputs):
        labels = inputs.get("labels")
        if labels is None:
            return None
        check_tensors(labels=labels)
        shape = tokens_shape(inputs)
        if shape is not None:
            check_mask_shape("labels", labels, *shape[:2])
        return labels != IGNORE_INDEX


def tokens_shape(inputs: dict) -> torch.Size | None:
    """`(B, S)`, or `(B, choices, S)`; None without an input, which the model will say."""
    ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
    check_tensors(input_ids=ids, inputs_embeds=embeds)
    if ids is not None:
        return ids.shape
    return None if embeds is None else embeds.shape[:-1]


def positions_like(inputs: dict, value: bool) -> torch.Tensor | None:
    """`(B, S)` bool, choices one below the other; None without an input."""
    shape = tokens_shape(inputs)
    if shape is None:
        return None
    *size, length = shape
    ids = inputs.get("input_ids")
    device = (inputs["inputs_embeds"] if ids is None else ids).device
    return torch.full((math.prod(size), length), value, dtype=torch.bool, device=device)


class QuestionAnsweringHead(TaskHead):
    """A head whose softmax runs over all positions, so padded ones are computed as query-only
    rows.

    As in transformers, a start or an end beyond the last position counts for nothing, and a
    negative one, -100 too, means position 0.

    Attributes:
        scores_padding: set it to False where answers are taken from texts alone: without labels no
            padding is computed then, and has the score -inf.
    """

    scores_padding = True

    def _check_labels(self, inputs):
        shape = tokens_shape(inputs)
        for name in ("start_positions", "end_positions"):
            positions = inputs.get(name)
            check_tensors(**{name: positions})
            if positions is None or shape is None:
                continue
            check_label_dtype(name, positions)
            if positions.shape not in ((shape[0],), (shape[0], 1)):
                raise ValueError(
                    f"{name} must have shape ({shape[0]},), a position for each text, got "
                    f"{tuple(positions.shape)}"
                )

    def rows_read(self, inputs):
        return None if self._leaves_out_padding(inputs) else positions_like(inputs, True)

    def finish_scores(self, outputs, inputs):
        if not self._leaves_out_padding(inputs):
            return
        is_padding = inputs["attention_mask"] == 0
        for name in ("start_logits", "end_logits"):
            outputs[name] = outputs[name].masked_fill(is_padding, -math.inf)

    def _leaves_out_padding(self, inputs: dict) -> bool:
        mask, labels = inputs.get("attention_mask"), inputs.get("start_positions")
        return (
            not self.scores_padding
            and labels is None
            and isinstance(mask, torch.Tensor)
            and mask.dim() == 2
        )


# --- heads with a vocabulary ----------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class TableDecoder:
    """A decoder that is no module: rows times the words' table, and a bias `(V,)`."""

    table: nn.Embedding
    bias: nn.Parameter

    @property
    def weight(self) -> torch.Tensor:
        return self.table.weight

    @property
    def out_features(self) -> int:
        return len(self.weight)

    def parameters(self) -> tuple[torch.Tensor, ...]:
        return self.weight, self.bias


@dataclass(slots=True, eq=False)
class VocabularyParts:
    """decoder(norm(activation(dense(x)))): the modules of a masked-LM head.

    Attributes:
        dense: C to E. activation: module or function. norm: LayerNorm of E.
        decoder: Linear E to V, or the words' table in its place.
        containers: modules around them whose forward is not called, with their exact classes.
    """

    dense: nn.Module
    activation: Callable
    norm: nn.Module
    decoder: nn.Module | TableDecoder
    containers: tuple[tuple[nn.Module, type], ...] = ()

    def parameters(self) -> list[torch.Tensor]:
        """Every weight the scores depend on."""
        return [p for m in (self.dense, self.norm, self.decoder) for p in m.parameters()]

    def are_plain(self) -> bool:
        """Whether the head may be fused."""
        return (
            all(type(m) is kind and is_unhooked(m) for m, kind in self.containers)
            and is_plain_linear(self.dense)
            and is_plain_norm(self.norm)
            and gelu_form(self.activation) is not None
            and self._decodes_plainly()
            and all(map(is_ordinary, self.parameters()))
        )

    def _decodes_plainly(self) -> bool:
        if isinstance(self.decoder, TableDecoder):
            return is_plain_table(self.decoder.table)
        return is_plain_linear(self.decoder)

    def transform(self, rows: torch.Tensor) -> torch.Tensor:
        """`(P, E)` of hidden rows `(P, C)`, fused."""
        dense = self.dense
        activated = linear_gelu(
            rows, dense.weight, dense.bias, approximate=gelu_form(self.activation)
        )
        return add_norm(activated, None, None, self.norm, 0, None)

    def scores(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(..., V)` of hidden states `(..., C)`, by calling the modules."""
        return self.decoder(self.norm(self.activation(self.dense(hidden_states))))


class VocabularyHead(Head):
    """What the heads with a vocabulary share: loss from labelled rows, logits when read.

    Attributes:
        sparse_prediction: beside a loss, logits are `(P, V)`, of the labelled rows alone.
        sparse_pred_ignore_index: the label that is ignored then.
    """

    sparse_prediction = False
    sparse_pred_ignore_index = IGNORE_INDEX

    # --- what differs between families

    def vocabulary_parts(self) -> VocabularyParts:
        """The modules of the family's masked-LM head."""
        raise NotImplementedError

    def scores_by_modules(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(..., V)` of hidden states `(..., C)`, by calling the head's modules."""
        return self.vocabulary_parts().scores(hidden_states)

    # --- what they share

    def decoder_layer(self) -> nn.Module | TableDecoder:
        """What takes features to the vocabulary."""
        return self.vocabulary_parts().decoder

    def is_plain_head(self) -> bool:
        """Whether the head's modules are exactly what the ops compute."""
        return self.vocabulary_parts().are_plain()

    def transform(self, rows: torch.Tensor) -> torch.Tensor:
        """What the decoder of a plain head reads, of hidden rows `(P, C)`."""
        return self.vocabulary_parts().transform(rows)

    def head_parameters(self) -> list[torch.Tensor]:
        """All weights that the logits depend on behind the model."""
        return self.vocabulary_parts().parameters()

    def run_model(self, inputs: dict, labels, label_rows):
        """The model below, with labelled rows computed even where they are padding."""
        required = None
        if label_rows is not None and inputs.get("cu_seq_lens_q") is None:
            raise ValueError(
                "label_rows are rows of packed input and need cu_seq_lens_q; of a padded batch "
                "the labelled rows are found by the labels"
            )
        if labels is not None:
            ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
            check_tensors(input_ids=ids, inputs_embeds=embeds, labels=labels)
            check_mask_shape("labels", labels, *(embeds if ids is None else ids).shape[:2])
            if label_rows is None:
                required = labels != self._ignored_label()
            for name, rows in (
                ("label_rows", label_rows),
                ("last_layer_rows", inputs.get("last_layer_rows")),
            ):
                if rows is not None and dispatch.is_checkable(labels):
                    check_reach(name, rows, labels)
        return self.base_model(**inputs, required_rows=required, keep_rows=True, return_dict=True)

    def score(self, outputs, labels, label_rows, num_items_in_batch, return_logits):
        """Loss and logits, each None where not asked for."""
        if labels is None:
            return None, self.scores_of_rows(outputs, self._scores) if return_logits else None
        rows, labels = self._labelled_rows(outputs, labels, label_rows)
        loss = mean_loss(self._losses(rows, labels), labels, num_items_in_batch)
        return loss, self._logits_beside_loss(outputs, rows) if return_logits else None

    def _ignored_label(self) -> int:
        return self.sparse_pred_ignore_index if self.sparse_prediction else IGNORE_INDEX

    def _labelled_rows(self, outputs, labels, label_rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden rows `(P, C)` and labels `(P,)` where there is a label; all while traced."""
        batch, rows = outputs.__dict__.get("packed", (None, None))
        labels = labels.reshape(-1).to(outputs.last_hidden_state.device)
        if rows is None:
            rows = outputs.last_hidden_state.flatten(0, 1)
        elif batch.indices is not None:
            labels = labels[batch.indices]
        if label_rows is None:
            if dispatch.is_symbolic(rows):
                return rows, labels
            labelled = labels != self._ignored_label()
            counted = batch is not None and batch.num_required is not None
            label_rows = batch.required(labelled) if counted else labelled.nonzero().view(-1)
        elif dispatch.is_checkable(labels) and not self.sparse_prediction:
            # Rows that only fill the capacity cost a decoder's product each.
            label_rows = label_rows[labels[label_rows] != IGNORE_INDEX]
        return unpad(rows, label_rows), labels[label_rows]

    def _losses(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """`(P,)` cross-entropies in fp32, 0 where a label is ignored."""
        if self.is_plain_head():
            decoder = self.decoder_layer()
            return mlm_cross_entropy(self.transform(rows), decoder.weight, decoder.bias, labels)
        scores = self.scores_by_modules(rows).float()
        return nn.functional.cross_entropy(scores, labels, reduction="none")

    def _scores(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(..., V)` of hidden states `(..., C)`."""
        if dispatch.is_symbolic(hidden_states) or not self.is_plain_head():
            return self.scores_by_modules(hidden_states)
        rows = self.transform(hidden_states.reshape(-1, hidden_states.shape[-1]))
        decoder = self.decoder_layer()
        scores = own_linear(rows, decoder.weight, decoder.bias, cache=self.weight_cache)
        return scores.view(*hidden_states.shape[:-1], scores.shape[-1])

    def _logits_beside_loss(self, outputs, rows: torch.Tensor) -> torch.Tensor | LazyLogits:
        """Logits, or their stand-in where nothing needs the values now: eager training on plain
        modules."""

        def compute():
            if self.sparse_prediction:
                return self._scores(rows)
            return self.scores_of_rows(outputs, self._scores)

        hidden = outputs.last_hidden_state
        lazy = self.training and not dispatch.is_symbolic(hidden) and self.is_plain_head()
        if not lazy or is_sharded(self) or is_sharded(self.base_model):
            return compute()
        size = (len(rows),) if self.sparse_prediction else hidden.shape[:2]
        return LazyLogits(
            Deferred(compute, self.head_parameters(), hidden.device),
            (*size, self.decoder_layer().out_features),
            compute_dtype(hidden) or hidden.dtype,
            hidden.device,
        )


class MaskedLMHead(VocabularyHead):
    """The forward of a masked-LM head, as `fastbert.BertForMaskedLM` describes it."""

    def forward(self, **inputs):
        if self.plain_forward():
            return self.transformers_forward(inputs)
        labels = inputs.pop("labels", None)
        label_rows = inputs.pop("label_rows", None)
        num_items_in_batch = inputs.pop("num_items_in_batch", None)
        return_logits = inputs.pop("return_logits", True)
        return_dict = pop_return_dict(self.config, inputs)
        outputs = self.run_model(inputs, labels, label_rows)
        loss, logits = self.score(outputs, labels, label_rows, num_items_in_batch, return_logits)
        kind = LazyMaskedLMOutput if isinstance(logits, LazyLogits) else MaskedLMOutput
        result = kind(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return result if return_dict else result.to_tuple()


class PreTrainingHead(VocabularyHead):
    """Masked language modelling and a question about the pair of texts: next sentence, order.

    As `MaskedLMHead`; the loss is given when both `labels` and the pair's labels are.

    Attributes:
        pair_labels: name of the argument with the pair's labels `(B,)`.
        pair_logits: name of the output with its logits `(B, 2)`.
        output_type: transformers' output. lazy_output_type: the same with lazy logits.
    """

    pair_labels: str
    pair_logits: str
    output_type: type
    lazy_output_type: type

    def score_pairs(self, pooled: torch.Tensor) -> torch.Tensor:
        """`(B, 2)` logits of `pooler_output` `(B, C)`."""
        raise NotImplementedError

    def forward(self, **inputs):
        if self.plain_forward():
            return self.transformers_forward(inputs)
        labels = inputs.pop("labels", None)
        label_rows = inputs.pop("label_rows", None)
        pair_labels = inputs.pop(self.pair_labels, None)
        num_items_in_batch = inputs.pop("num_items_in_batch", None)
        return_logits = inputs.pop("return_logits", True)
        return_dict = pop_return_dict(self.config, inputs)
        has_loss = labels is not None and pair_labels is not None
        labels = labels if has_loss else None
        if has_loss:
            check_tensors(**{self.pair_labels: pair_labels})
            check_labels(pair_labels, 2, self.pair_labels)
        outputs = self.run_model(inputs, labels, label_rows)
        with own_linears(self):
            pair_logits = self.score_pairs(outputs.pooler_output)
        loss, logits = self.score(outputs, labels, label_rows, num_items_in_batch, return_logits)
        if has_loss:
            pairs = nn.functional.cross_entropy(
                pair_logits.view(-1, 2).float(), pair_labels.view(-1)
            )
            loss = loss + rescaled_loss(pairs, labels, num_items_in_batch)
        kind = self.lazy_output_type if isinstance(logits, LazyLogits) else self.output_type
        result = kind(
            loss=loss,
            prediction_logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{self.pair_logits: pair_logits},
        )
        return result if return_dict else result.to_tuple()
