"""Heads that say of every token whether it was replaced (Clark et al. 2020, section 2).

Letters: B batch, S padded length.
"""

import torch
from torch import nn
from transformers.models.electra.modeling_electra import ElectraForPreTrainingOutput

from fastbert.models.heads import Head
from fastbert.models.inputs import check_tensors
from fastbert.models.losses import rescaled_loss
from fastbert.models.packed import pop_return_dict
from fastbert.padding import check_mask_shape


class DetectionHead(Head):
    """The forward of a discriminator, as `fastbert.ElectraForPreTraining` describes it."""

    def forward(self, **inputs):
        if self.plain_forward():
            return self.transformers_forward(inputs)
        labels = inputs.pop("labels", None)
        num_items_in_batch = inputs.pop("num_items_in_batch", None)
        return_dict = pop_return_dict(self.config, inputs)
        check_tensors(labels=labels)
        outputs = self.base_model(**inputs, keep_rows=True, return_dict=True)
        logits = self.token_scores(outputs, inputs.get("attention_mask"))
        loss = None
        if labels is not None:
            check_mask_shape("labels", labels, *logits.shape)
            loss = replaced_loss(logits, labels, inputs.get("attention_mask"))
            if num_items_in_batch is not None:
                loss = rescaled_loss(loss, labels, num_items_in_batch)
        result = ElectraForPreTrainingOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return result if return_dict else result.to_tuple()

    def token_scores(self, outputs, attention_mask) -> torch.Tensor:
        """`(B, S)` logits.

        Args:
            outputs: of the model below, which was told to keep its rows.
            attention_mask: as given.
        """
        raise NotImplementedError


def replaced_loss(logits: torch.Tensor, labels: torch.Tensor, mask) -> torch.Tensor:
    """Mean binary cross-entropy of logits `(B, S)` where the mask is 1; 0 where it is nowhere."""
    losses = nn.functional.binary_cross_entropy_with_logits(
        logits.float(), labels.to(logits.device).float(), reduction="none"
    )
    if mask is None:
        return losses.mean()
    counted = mask.to(logits.device).view(-1, logits.shape[1]) == 1
    return torch.where(counted, losses, 0).sum() / counted.sum().clamp(min=1)
