"""Injects one fault at a time into a copy of the source and demands that the suite notices.

    python tests/teeth.py [NAME ...]

Each fault is a replacement in one file and the tests that must fail for it. A fault whose text is
no longer found is an error too: it has to follow the code. Faults in C++ are compiled, up to three
minutes each, and come last: the build of one is only mended by the next. Those in CUDA sources must
be noticed by the emulated kernels alone.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# name: file, what stands there, what is put in its place, tests of which one must fail
FAULTS = {
    "positions of answers have any shape": (
        "fastbert/models/heads.py",
        "if positions.shape not in ((shape[0],), (shape[0], 1)):",
        "if False:",
        "tests/models/test_bert_inputs.py",
    ),
    "a frozen model is saved in part": (
        "fastbert/models/loading.py",
        'self.refuse_if_frozen_within("save_pretrained()")',
        "pass",
        "tests/models/test_freeze.py",
    ),
    "a hub that cannot be reached is asked again": (
        "fastbert/folders.py",
        '_check_hub_names(argument, [value] if owner is None else [value, f"{owner}/{value}"])',
        "pass",
        "tests/test_folders.py",
    ),
    "special tokens are masked": (
        "fastbert/data/masking.py",
        "maskable = ~vocabulary.special[ids]",
        "maskable = np.ones(len(ids), bool)",
        "tests/data/test_masking.py",
    ),
    "masked shares are 80/11/9": (
        "fastbert/data/masking.py",
        "(masking.mask_share + masking.random_share) * _FULL",
        "(masking.mask_share + 1.1 * masking.random_share) * _FULL",
        "tests/data/test_masking.py",
    ),
    "a collator's epochs are alike": (
        "fastbert/data/collators.py",
        "self._starts[worker] += 1",
        "self._starts[worker] = 1",
        "tests/data/test_collators.py",
    ),
    "next sentences come from the same document": (
        "fastbert/data/pairs.py",
        "other += other >= document",
        "other += other > document",
        "tests/data/test_pairs.py",
    ),
    "a shard is written in place": (
        "fastbert/data/corpus.py",
        'part = folder.with_suffix(f".{os.getpid()}.part")',
        "part = folder",
        "tests/data/test_corpus.py",
    ),
    "workers outlive their parent": (
        "fastbert/data/preparation.py",
        "multiprocessing.parent_process().join()\n    os._exit(1)",
        "multiprocessing.parent_process().join()",
        "tests/data/test_corpus.py",
    ),
    "labels counted in one process alone": (
        "fastbert/train/graphed_step.py",
        "        self._add_over_processes(num_labels)\n",
        "",
        "tests/train/test_processes.py::test_processes_equal_one[ddp-packed-2]",
    ),
    "gradients of processes averaged, not summed": (
        "fastbert/train/graphed_step.py",
        "share = share / distributed.get_world_size()",
        "share = share / 1",
        "tests/train/test_processes.py::test_processes_equal_one[ddp-packed-2]",
    ),
    "norm of one process's part of the gradients": (
        "fastbert/train/graphed_step.py",
        "gradients = [p.grad for p",
        "gradients = [parallel.own_part(p.grad) for p",
        "tests/train/test_processes.py::test_processes_equal_one[zero1-packed-2]",
    ),
    "processes draw the same dropout": (
        "fastbert/train/pretraining.py",
        "self._graphed_step(_dropout_seed(config.seed, self.processes.rank))",
        "self._graphed_step(_dropout_seed(config.seed, 0))",
        "tests/train/test_processes.py::test_processes_repeat_themselves_and_resume[ddp]",
    ),
    "whole weights outlive the step": (
        "fastbert/train/parallel.py",
        "        if is_due:\n            _shard(model)\n",
        "",
        "tests/train/test_processes.py::test_processes_equal_one[zero1-packed-2]",
    ),
    "gradients sent for every batch": (
        "fastbert/train/parallel.py",
        "model.set_requires_gradient_sync(is_due)",
        "model.set_requires_gradient_sync(True)",
        "tests/train/test_parallel.py::test_sharded_layers_are_fused_and_gradients_sent_once_a_step",
    ),
    "gradients sent in fp32": (
        "fastbert/train/parallel.py",
        "torch.bfloat16 if config.reduce_dtype",
        "torch.float32 if config.reduce_dtype",
        "tests/train/test_parallel.py::test_gradients_in_bf16[fsdp-bf16-stable_adamw]",
    ),
    "sharded weights taken for foreign ones": (
        "fastbert/encoder.py",
        "return type(tensor) in (nn.Parameter, torch.Tensor)",
        "return type(tensor) is torch.Tensor",
        "tests/train/test_parallel.py::test_sharded_layers_are_fused_and_gradients_sent_once_a_step",
    ),
    "dropout stream not restored": (
        "fastbert/train/graphed_step.py",
        'self.rng_state.copy_(state["rng_state"])',
        "pass",
        "tests/train/test_resume.py::test_killed_in_a_save",
    ),
    "random state not restored": (
        "fastbert/train/pretraining.py",
        'torch.set_rng_state(state["torch_rng"])',
        "pass",
        "tests/train/test_resume.py::test_all_that_was_saved_is_restored",
    ),
    "NumPy's random state not restored": (
        "fastbert/train/pretraining.py",
        'np.random.set_state(state["numpy_rng"])',
        "pass",
        "tests/train/test_resume.py::test_all_that_was_saved_is_restored",
    ),
    "Python's random state not restored": (
        "fastbert/train/pretraining.py",
        'random.setstate(state["python_rng"])',
        "pass",
        "tests/train/test_resume.py::test_all_that_was_saved_is_restored",
    ),
    "schedule not restored": (
        "fastbert/train/pretraining.py",
        'self.scheduler.load_state_dict(state["scheduler"])',
        "pass",
        "tests/train/test_resume.py::test_all_that_was_saved_is_restored",
    ),
    "loss scale lost": (
        "fastbert/train/pretraining.py",
        'self.scaler.load_state_dict(state["scaler"])',
        "pass",
        "tests/train/test_resume.py::test_all_that_was_saved_is_restored",
    ),
    "place in a shard not restored": (
        "fastbert/train/batches.py",
        "sampler.load_state_dict(place.sampler)",
        "pass",
        "tests/train/test_resume.py::test_killed_in_a_save",
    ),
    "place of batches that were prepared ahead": (
        "fastbert/train/pretraining.py",
        "self.place = batches[-1].place",
        "self.place = batches[0].place",
        "tests/train/test_resume.py::test_killed_in_a_save",
    ),
    "other processes go on at another masking step": (
        "fastbert/train/batches.py",
        "batches=self.batches * before // num_ranks",
        "batches=self.batches",
        "tests/train/test_parallel.py::test_other_processes_meet_the_rest_of_the_epoch",
    ),
    "average not saved": (
        "fastbert/train/pretraining.py",
        'average = {} if self.average is None else {"average": self.average.state_dict()}',
        "average = {}",
        "tests/train/test_resume.py::test_all_that_was_saved_is_restored",
    ),
    "average left in the model after evaluation": (
        "fastbert/train/averaging.py",
        "        finally:\n            self._swap()\n",
        "        finally:\n            pass\n",
        "tests/train/test_averaging.py",
    ),
    "manifest not durable": (
        "fastbert/data/corpus.py",
        "_write_durably(part, text.encode())",
        "part.write_bytes(text.encode())",
        "tests/train/test_resume.py::test_durable_before_it_is_named",
    ),
    "checkpoint's name not durable": (
        "fastbert/train/checkpoints.py",
        "os.rename(part, target)\n        sync_folder(self.folder)\n",
        "os.rename(part, target)\n",
        "tests/train/test_resume.py::test_durable_before_it_is_named",
    ),
    "checkpoint written in place": (
        "fastbert/train/checkpoints.py",
        'part = target.with_suffix(".part")\n\n        def write',
        "part = target\n\n        def write",
        "tests/train/test_resume.py::test_killed_in_a_save",
    ),
    "checksums not compared": (
        "fastbert/train/checkpoints.py",
        'if _sha256(path / name) != expected["sha256"]:',
        "if False:",
        "tests/train/test_resume.py::test_damaged_checkpoint",
    ),
    "one checkpoint too many kept": (
        "fastbert/train/checkpoints.py",
        "self.names()[: -self.keep]",
        "self.names()[: -self.keep - 1]",
        "tests/train/test_resume.py::test_all_that_was_saved_is_restored",
    ),
    "full disk in the background not told": (
        "fastbert/train/checkpoints.py",
        "            writing.result()\n",
        "            writing.exception()\n",
        "tests/train/test_resume.py::test_full_disk",
    ),
    "state written while it changes": (
        "fastbert/train/checkpoints.py",
        "self._write, step, _copied(state))",
        "self._write, step, state)",
        "tests/train/test_resume.py::test_the_state_of_its_step_is_written",
    ),
    "a process takes another's sequences": (
        "fastbert/data/sampler.py",
        "yield batches[self.rank].tolist()",
        "yield batches[0].tolist()",
        "tests/data/test_sampler.py",
    ),
    "every epoch in one order": (
        "fastbert/data/sampler.py",
        "return generator(self.seed, self.epoch).permutation(len(self.lengths))",
        "return generator(self.seed, 0).permutation(len(self.lengths))",
        "tests/data/test_sampler.py",
    ),
    "rotary's gradient turns onwards": (
        "fastbert/ops/rotary.py",
        "*ctx.saved_tensors, True)",
        "*ctx.saved_tensors, False)",
        "tests/ops/test_rotary.py",
    ),
    "geglu gates the other half": (
        "fastbert/reference/geglu.py",
        "return (F.gelu(u, approximate=approximate) * v).to(x.dtype)",
        "return (F.gelu(v, approximate=approximate) * u).to(x.dtype)",
        "tests/ops/test_geglu.py",
    ),
    "a local layer sees a token more": (
        "fastbert/encoder_prenorm.py",
        "(spec.window, spec.window) if narrow",
        "(spec.window, spec.window + 1) if narrow",
        "tests/models/test_modernbert.py",
    ),
    "windows over masks with holes": (
        "fastbert/padding.py",
        "return not (apart & ~starts[1:-1]).any()",
        "return True",
        "tests/models/test_modernbert.py",
    ),
    "mask ignored": (
        "fastbert/padding.py",
        "real = (attention_mask.to(device) != 0).reshape(-1)",
        "real = (attention_mask.to(device) == attention_mask.to(device)).reshape(-1)",
        "tests/models/test_bert_parity.py",
    ),
    "query-only rows become keys": (
        "fastbert/padding.py",
        "kv_indices = _nonzero(real[indices], num_real)",
        "kv_indices = _nonzero(torch.ones_like(indices, dtype=torch.bool), num_computed)",
        "tests/test_padding.py",
    ),
    "first row of left padding wrong": (
        "fastbert/padding.py",
        "first = torch.where(is_real, first, first + self.cu_seqlens_k.diff())",
        "first = torch.where(is_real, first, first)",
        "tests/models/test_bert_first.py",
    ),
    "bias gradient dropped": (
        "fastbert/reference/bias_gelu.py",
        "rows.sum(0).to(bias.dtype)",
        "rows.sum(0).to(bias.dtype) * 0",
        "tests/ops/test_bias_gelu.py",
    ),
    "linear bias gradient dropped": (
        "fastbert/reference/add_layer_norm.py",
        "dbranch.sum(0).to(linear_bias.dtype)",
        "dbranch.sum(0).to(linear_bias.dtype) * 0",
        "tests/ops/test_add_layer_norm.py",
    ),
    "dropout rescale missing": (
        "fastbert/reference/add_layer_norm.py",
        "scale = dropout_scale(threshold)",
        "scale = 1.0",
        "tests/ops/test_add_layer_norm.py",
    ),
    "dropout mask of backward differs": (
        "fastbert/ops/add_layer_norm.py",
        "threshold, keep = _keep_mask(h, dropout_p, site, rng_state)",
        "threshold, keep = _keep_mask(h, dropout_p, site + 1, rng_state)",
        "tests/ops/test_add_layer_norm.py",
    ),
    "two dropouts share a site": (
        "fastbert/encoder.py",
        "site = layer_site(spec.index, PLACE_FFN_OUTPUT)",
        "site = layer_site(spec.index, PLACE_ATTENTION_OUTPUT)",
        "tests/models/test_bert_dropout.py",
    ),
    "one round of Philox less": (
        "fastbert/reference/philox.py",
        "ROUNDS = 7",
        "ROUNDS = 6",
        "tests/ops/test_philox.py",
    ),
    "threshold off by one": (
        "fastbert/reference/philox.py",
        "keep = _halves(words) >= threshold\n        chunks",
        "keep = _halves(words) > threshold\n        chunks",
        "tests/ops/test_philox.py",
    ),
    "window off by one": (
        "fastbert/reference/attention.py",
        "inside &= offset <= right",
        "inside &= offset < right",
        "tests/ops/test_attention.py",
    ),
    "softmax scale ignored": (
        "fastbert/reference/attention.py",
        ".mul_(softmax_scale)\n    if window",
        ".mul_(1.0)\n    if window",
        "tests/ops/test_attention.py",
    ),
    "softmax gradient without its row sum": (
        "fastbert/reference/attention.py",
        "dscores = dscores.mul_(softmax_scale).to(q.dtype)",
        "dscores = (dweights * weights).mul_(softmax_scale).to(q.dtype)",
        "tests/ops/test_attention.py",
    ),
    "logarithmic buckets rounded down": (
        "fastbert/reference/disentangled_attention.py",
        "torch.ceil(torch.log(far",
        "torch.floor(torch.log(far",
        "tests/ops/test_disentangled_attention.py",
    ),
    "DeBERTa packs texts with holes": (
        "fastbert/models/deberta_v2.py",
        "is_symbolic(batch.indices) or not rows_are_neighbours(batch)",
        "is_symbolic(batch.indices)",
        "tests/models/test_deberta_v2.py",
    ),
    "erf GELU becomes tanh": (
        "fastbert/models/packed.py",
        'activation is nn.functional.gelu:\n        return "none"',
        'activation is nn.functional.gelu:\n        return "tanh"',
        "tests/models/test_bert_parity.py",
    ),
    "padding id gets a gradient": (
        "fastbert/reference/embed_layer_norm.py",
        "one_hot &= row != padding_idx",
        "one_hot &= row >= 0",
        "tests/ops/test_embed_layer_norm.py",
    ),
    "position ids ignored": (
        "fastbert/models/post_norm.py",
        "if position_ids is None and cu_seqlens is None:",
        "if cu_seqlens is None:",
        "tests/models/test_bert_inputs.py",
    ),
    "stale cache after a fused optimizer": (
        "fastbert/cache.py",
        "if found is not None and found[0].matches(tensors):",
        "if found is not None:",
        "tests/models/test_bert_first.py",
    ),
    "one call for modules that changed": (
        "fastbert/watch.py",
        "return _C.same_identities(self._modules, self._types, self._tables, self._values)",
        "return True",
        "tests/models/test_prepared.py",
    ),
    "one call for weights that were written": (
        "fastbert/models/prepared.py",
        "and self.compiled.holds(self._tensors)",
        "and True",
        "tests/models/test_prepared.py",
    ),
    "one call after an optimizer's step": (
        "fastbert/models/prepared.py",
        "return self._step == cache.optimizer_steps() and",
        "return",
        "tests/models/test_prepared.py",
    ),
    "one call for another backend": (
        "fastbert/models/prepared.py",
        'or not dispatch.bound_to(*ROOMS) <= {"auto", "cpu"}:',
        "or False:",
        "tests/models/test_prepared.py",
    ),
    "one call where hidden states are wanted": (
        "fastbert/models/prepared.py",
        "if value is not None and value is not False and name not in _ARGUMENTS:",
        "if False:",
        "tests/models/test_prepared.py",
    ),
    "a prepared model keeps what freezing drops": (
        "fastbert/models/freeze.py",
        "encoder.weight_cache.clear()",
        "pass",
        "tests/models/test_freeze.py",
    ),
    "cache in a deep copy": (
        "fastbert/cache.py",
        "        return WeightCache(self.frozen)",
        "        return self",
        "tests/models/test_bert_cache.py",
    ),
    "num_items_in_batch ignored": (
        "fastbert/models/losses.py",
        "return losses.sum() / num_items_in_batch",
        "return losses.sum() / (labels != IGNORE_INDEX).sum().clamp(min=1)",
        "tests/models/test_bert_outputs.py",
    ),
    "logits read after the weights changed": (
        "fastbert/models/outputs.py",
        "if not self._fingerprint.matches(self._weights):",
        "if False:",
        "tests/models/test_bert_outputs.py",
    ),
    "logits computed by containers": (
        "fastbert/models/outputs.py",
        "if func is torch.Tensor.float and len(args) == 1 and not kwargs:",
        "if False:",
        "tests/models/test_bert_ecosystem.py",
    ),
    "ignored labels count": (
        "fastbert/reference/mlm_cross_entropy.py",
        "loss[rows] = torch.where(counted[rows], nll, 0)",
        "loss[rows] = nll",
        "tests/ops/test_mlm_cross_entropy.py",
    ),
    "a chunk of the decoder gradient lost": (
        "fastbert/reference/mlm_cross_entropy.py",
        "dweight = product if dweight is None else dweight.to(accumulate).add_(product)",
        "dweight = product",
        "tests/ops/test_mlm_cross_entropy.py",
    ),
    "soft targets without the square of the temperature": (
        "fastbert/reference/mlm_distillation.py",
        "torch.where(counted[rows], temperature**2 * soft, 0)",
        "torch.where(counted[rows], soft, 0)",
        "tests/ops/test_mlm_distillation.py",
    ),
    "a word ruled out by the teacher has a part": (
        "fastbert/reference/mlm_distillation.py",
        ".masked_fill_(of_teacher == 0, 0)",
        "",
        "tests/ops/test_mlm_distillation.py",
    ),
    "teacher's dropout left on": (
        "fastbert/train/distillation.py",
        "return model.float().eval().requires_grad_(False)",
        "return model.float().train().requires_grad_(False)",
        "tests/train/test_distillation.py",
    ),
    "cosine over idle rows": (
        "fastbert/models/distillation.py",
        "torch.where(real, apart, 0).sum() / real.sum()",
        "apart.mean()",
        "tests/models/test_distillation.py",
    ),
    "generator and discriminator drop the same elements": (
        "fastbert/models/replaced_tokens.py",
        "SECOND_STREAM = 1 << 31",
        "SECOND_STREAM = 0",
        "tests/models/test_replaced_tokens.py",
    ),
    "discriminator moves the disentangled table": (
        "fastbert/models/replaced_tokens.py",
        "self._base[0].weight.detach())\n        return shared",
        "self._base[0].weight)\n        return shared",
        "tests/models/test_replaced_tokens.py",
    ),
    "mask decoder without positions": (
        "fastbert/models/deberta_v2.py",
        "query, states = None, rows + places.to(rows.dtype)",
        "query, states = None, rows",
        "tests/models/test_deberta_pretraining.py",
    ),
    "mask decoder with keys of its own output": (
        "fastbert/models/deberta_v2.py",
        "            states = self.encoder.layer[last](\n                rows,",
        "            states = self.encoder.layer[last](\n                states if step else rows,",
        "tests/models/test_deberta_pretraining.py",
    ),
    "both runs of the mask decoder drop the same elements": (
        "fastbert/models/deberta_v2.py",
        "index=last + step,",
        "index=last,",
        "tests/models/test_deberta_pretraining.py",
    ),
    "each token judged beside itself": (
        "fastbert/models/deberta_pretraining.py",
        "device=own.device) - own\n",
        "device=own.device)\n",
        "tests/models/test_deberta_pretraining.py",
    ),
    "difference of two tables lost": (
        "fastbert/models/replaced_tokens.py",
        "            added.weight.sub_(words)\n",
        "",
        "tests/models/test_replaced_tokens.py",
    ),
    "samples from half of the words": (
        "fastbert/models/replaced_tokens.py",
        "sums[:, -1:]) >> 32",
        "sums[:, -1:]) >> 33",
        "tests/models/test_replaced_tokens.py",
    ),
    "token types lost in a DistilBERT": (
        "fastbert/train/distilbert.py",
        "weights[positions] = weights[positions] + types[0]",
        "weights[positions] = weights[positions] + 0 * types[0]",
        "tests/train/test_distillation.py",
    ),
    "second order in silence": (
        "fastbert/dispatch.py",
        "if torch.is_grad_enabled() and not torch.compiler.is_compiling():\n        raise",
        "if False:\n        raise",
        "tests/ops/test_unpad.py",
    ),
    "fallback to transformers everywhere": (
        "fastbert/models/post_norm.py",
        'if getattr(self.config, "is_decoder", False):',
        "if True:",
        "tests/models/test_bert_parity.py",
    ),
    "RoBERTa counts on from one packed text to the next": (
        "fastbert/models/roberta.py",
        "before - before.gather(1, starts) + 1",
        "before + 1",
        "tests/models/test_families.py",
    ),
    "RoBERTa's padding position gets a gradient": (
        "fastbert/models/embedding.py",
        "if table.padding_idx is None or",
        "if True or",
        "tests/models/test_roberta.py",
    ),
    "ALBERT's groups take turns": (
        "fastbert/models/albert.py",
        "groups[int(place / per_group)]",
        "groups[place % len(groups)]",
        "tests/models/test_albert.py",
    ),
    "discriminator counts padding": (
        "fastbert/models/detection.py",
        "torch.where(counted, losses, 0).sum()",
        "losses.sum()",
        "tests/models/test_electra.py",
    ),
    "Triton bias gradient reads one row too few": (
        "kernels/bias_gelu.py",
        "tl.minimum(part * part_rows + part_rows, num_rows)",
        "tl.minimum(part * part_rows + part_rows - 1, num_rows)",
        "tests/ops/test_bias_gelu.py",
    ),
    "Triton halves swapped": (
        "kernels/philox.py",
        "tl.join(pairs & 0xFFFF, pairs >> 16)",
        "tl.join(pairs >> 16, pairs & 0xFFFF)",
        "tests/ops/test_philox.py",
    ),
    "C++: keys outside the window seen": (
        "csrc/cpu/attention_kernel.h",
        "    e = seen_only(keys, c, e);\n",
        "",
        "tests/ops/test_attention.py",
    ),
    "C++: terms of position keys not shifted to their keys": (
        "csrc/cpu/disentangled_attention_kernel.h",
        "s.by_query + r * wide + kBlock - r",
        "s.by_query + r * wide + kBlock",
        "tests/ops/test_disentangled_attention.py",
    ),
    "C++: gradients of scores not slanted to their distances": (
        "csrc/cpu/disentangled_attention_kernel.h",
        "*lower = upper + step + 1;",
        "*lower = upper + step;",
        "tests/ops/test_disentangled_attention.py",
    ),
    "C++: dropout of attention's gradient not scaled": (
        "csrc/cpu/attention_kernel.h",
        "d = kept_only(bits, c, d * constant<V>(a.dropout.scale));",
        "d = kept_only(bits, c, d);",
        "tests/ops/test_attention.py",
    ),
    "C++: bias of a product dropped": (
        "csrc/cpu/gemm_kernel.h",
        "    if (f.bias != nullptr) v = v + part.load(f.bias + column + i, 0);\n",
        "",
        "tests/ops/test_linear.py",
    ),
    "C++: piece of a long sum forgotten": (
        "csrc/cpu/gemm.cpp",
        "  kernels().add_to(piece, sums, (upper ? kBlock / 2 : kBlock) * kBlock);\n",
        "",
        "tests/ops/test_linear.py",
    ),
    "C++: rows whose columns are shared are not finished": (
        "csrc/cpu/gemm.cpp",
        "if (finish_rows && !whole_rows) for_each_row_range(rows, columns, finish_rows);",
        "",
        "tests/ops/test_encoder.py",
    ),
    "C++: weight packed for other arithmetic used": (
        "csrc/cpu/gemm.cpp",
        "header.wanted == a &&",
        "true &&",
        "tests/ops/test_linear.py",
    ),
    "C++: label left out of the gradient": (
        "csrc/cpu/cross_entropy_kernel.h",
        "row[place] += a.hit[first + r];",
        "row[place] += 0.0f;",
        "tests/ops/test_mlm_cross_entropy.py",
    ),
    "C++: one group of the vocabulary forgotten": (
        "csrc/cpu/decoder.h",
        "for (int64_t group = 1; group < groups; ++group)",
        "for (int64_t group = 2; group < groups; ++group)",
        "tests/ops/test_mlm_cross_entropy.py",
    ),
    "C++: teacher left out of the gradient": (
        "csrc/cpu/distillation_kernel.h",
        "fma(q - p, constant<V>(factor), hard)",
        "fma(q, constant<V>(factor), hard)",
        "tests/ops/test_mlm_distillation.py",
    ),
    "C++: strips of the teacher beside the student's peak": (
        "csrc/cpu/mlm_distillation.cpp",
        "const float after = beside(next.teacher_peak, teacher_peak, cold);",
        "const float after = beside(next.peak, peak, cold);",
        "tests/ops/test_mlm_distillation.py",
    ),
    "C++: one part of a column sum forgotten": (
        "csrc/cpu/parallel.h",
        "for (int64_t part = 1; part < parts; ++part)",
        "for (int64_t part = 2; part < parts; ++part)",
        "tests/ops/test_bias_gelu.py",
    ),
    "CUDA: barrier before the sums of warps are read": (
        "csrc/cuda/common.cuh",
        "of_warps[thread / 32 * kValues + i] = x[i];\n    }\n    __syncthreads();\n",
        "of_warps[thread / 32 * kValues + i] = x[i];\n    }\n",
        "tests/ops/test_mlm_cross_entropy.py",
    ),
    "CUDA: barrier after the sums of warps were read": (
        "csrc/cuda/common.cuh",
        "    __syncthreads();  // what a call before this one left has been read\n",
        "",
        "tests/ops/test_mlm_cross_entropy.py",
    ),
    "CUDA: lanes left out of a sum": (
        "csrc/cuda/common.cuh",
        "for (int lanes = 16; lanes > 0; lanes /= 2)",
        "for (int lanes = 8; lanes > 0; lanes /= 2)",
        "tests/ops/test_add_layer_norm.py",
    ),
    "CUDA: columns that are not there": (
        "csrc/cuda/common.cuh",
        "if (column + i < columns) row[column + i] = from_float<T>(v[i]);",
        "if (column + i <= columns) row[column + i] = from_float<T>(v[i]);",
        "tests/ops/test_add_layer_norm.py",
    ),
    "CUDA: halves of a word swapped": (
        "csrc/cuda/common.cuh",
        "keeps(stream, words.word[i / 2], i % 2)",
        "keeps(stream, words.word[i / 2], 1 - i % 2)",
        "tests/ops/test_add_layer_norm.py",
    ),
    "CUDA: dropped elements multiplied": (
        "csrc/cuda/common.cuh",
        "? v[i] * scale : 0.0f;",
        "? v[i] * scale : v[i] * 0.0f;",
        "tests/ops/test_add_layer_norm.py",
    ),
    "CUDA: columns beyond the row in its variance": (
        "csrc/cuda/layer_norm.cuh",
        "v[c][i] = Layout::inside(c, i, columns) ? v[c][i] - mean : 0.0f;",
        "v[c][i] = v[c][i] - mean;",
        "tests/ops/test_add_layer_norm.py",
    ),
    "CUDA: barrier before parts are read": (
        "csrc/cuda/layer_norm.cuh",
        "sums[c][6], sums[c][7]}};\n    }\n    __syncthreads();\n",
        "sums[c][6], sums[c][7]}};\n    }\n",
        "tests/ops/test_add_layer_norm.py",
    ),
    "CUDA: barrier after parts were read": (
        "csrc/cuda/layer_norm.cuh",
        "    __syncthreads();  // the vector before this one has been read\n",
        "",
        "tests/ops/test_add_layer_norm.py",
    ),
    "CUDA: slope left out of the gradient of a norm": (
        "csrc/cuda/layer_norm.cuh",
        "rstd * (g[c][i] - mean_of_g - normal[c][i] * slope)",
        "rstd * (g[c][i] - mean_of_g)",
        "tests/ops/test_add_layer_norm.py",
    ),
    "CUDA: gradient of the sum forgotten": (
        "csrc/cuda/add_layer_norm.cu",
        "        add_to(g[c], dh);\n",
        "",
        "tests/ops/test_add_layer_norm.py",
    ),
    "CUDA: mask of backward another": (
        "csrc/cuda/add_layer_norm.cu",
        "first_call + column / kChunk, g[c]);",
        "first_call + 1 + column / kChunk, g[c]);",
        "tests/ops/test_add_layer_norm.py",
    ),
    "CUDA: threads that leave a block early": (
        "csrc/cuda/sum_parts.cu",
        "  of_slices[slice",
        "  if (a.parts <= slice) return;\n  of_slices[slice",
        "tests/ops/test_bias_gelu.py",
    ),
    "CUDA: barrier of the slices": (
        "csrc/cuda/sum_parts.cu",
        "  __syncthreads();\n",
        "",
        "tests/ops/test_bias_gelu.py",
    ),
    "CUDA: last part forgotten": (
        "csrc/cuda/sum_parts.cu",
        "part < a.parts; part += kSlices",
        "part < a.parts - 1; part += kSlices",
        "tests/ops/test_bias_gelu.py",
    ),
    "CUDA: bias left out of the gradient": (
        "csrc/cuda/bias_gelu.cu",
        "dy[i] * gelu_gradient<kErf>(v[i] + bias[i])",
        "dy[i] * gelu_gradient<kErf>(v[i])",
        "tests/ops/test_bias_gelu.py",
    ),
    "CUDA: one slice of an id forgotten": (
        "csrc/cuda/embed_layer_norm.cu",
        "for (int other = 1; other < kSlices; ++other) {",
        "for (int other = 2; other < kSlices; ++other) {",
        "tests/ops/test_embed_layer_norm.py",
    ),
    "CUDA: barrier of an id's slices": (
        "csrc/cuda/embed_layer_norm.cu",
        "  __syncthreads();\n",
        "",
        "tests/ops/test_embed_layer_norm.py",
    ),
    "CUDA: padding id gets a gradient": (
        "csrc/cuda/embed_layer_norm.cu",
        "slot == within && slot != a.skipped ? v[i] : 0.0f",
        "slot == within ? v[i] : 0.0f",
        "tests/ops/test_embed_layer_norm.py",
    ),
    "CUDA: rescale of the running sum": (
        "csrc/cuda/mlm_cross_entropy.cu",
        "    s.exponentials *= expf(s.peak - base);\n",
        "",
        "tests/ops/test_mlm_cross_entropy.py",
    ),
    "CUDA: words behind the vocabulary": (
        "csrc/cuda/logits.cuh",
        "    if (column + i >= vocabulary) z[i] = minus_infinity();\n",
        "",
        "tests/ops/test_mlm_cross_entropy.py",
    ),
    "CUDA: smoothing left out of the gradient": (
        "csrc/cuda/mlm_cross_entropy.cu",
        "expf(z[i] - lse) - of_every - ",
        "expf(z[i] - lse) - ",
        "tests/ops/test_mlm_cross_entropy.py",
    ),
    "CUDA: label left out of the gradient": (
        "csrc/cuda/mlm_cross_entropy.cu",
        "(column + i == label ? of_label : 0.0f)",
        "0.0f",
        "tests/ops/test_mlm_cross_entropy.py",
    ),
    "CUDA: the teacher's sums are not moved to a new peak": (
        "csrc/cuda/mlm_distillation.cu",
        "  s.apart *= teacher_scale;\n",
        "",
        "tests/ops/test_mlm_distillation.py",
    ),
    "CUDA: teacher left out of the gradient": (
        "csrc/cuda/mlm_distillation.cu",
        " - expf(t[i] * cold - teacher_lse);",
        ";",
        "tests/ops/test_mlm_distillation.py",
    ),
    "CUDA: forward of attention does not wait for its first tile": (
        "csrc/cuda/attention_fwd.cuh",
        "  copy_async_commit();\n  copy_async_wait<0>();\n",
        "  copy_async_commit();\n",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: forward of attention does not wait for the next tile": (
        "csrc/cuda/attention_fwd.cuh",
        "    copy_async_wait<0>();\n    __syncthreads();",
        "    __syncthreads();",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: barrier between tiles of the forward of attention": (
        "csrc/cuda/attention_fwd.cuh",
        "    copy_async_wait<0>();\n    __syncthreads();",
        "    copy_async_wait<0>();\n",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: sums of attention not rescaled": (
        "csrc/cuda/attention_fwd.cuh",
        "        out[j][2 * h] *= shrink;\n",
        "",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: total of the softmax not rescaled": (
        "csrc/cuda/attention_fwd.cuh",
        "      total[h] *= shrink;\n",
        "",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: keys that are not seen": (
        "csrc/cuda/attention_fwd.cuh",
        "hide_unseen(a, own.first, first + c * kWarpRows, keys.length, s[c]);",
        ";",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: rows without a key so far": (
        "csrc/cuda/attention_fwd.cuh",
        "most == -INFINITY ? 0.0f : most",
        "most",
        "tests/ops/test_attention.py",
    ),
    "CUDA: kept probabilities not scaled": (
        "csrc/cuda/attention_fwd.cuh",
        "a.dropout.scale / total",
        "1.0f / total",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: columns behind the head dim": (
        "csrc/cuda/attention.cuh",
        "there ? 16 : 0",
        "16",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: rows overwritten before they are read": (
        "csrc/cuda/attention.cuh",
        "own = first_row_of_warp();\n  __syncwarp();\n",
        "own = first_row_of_warp();\n",
        "tests/ops/test_attention.py",
    ),
    "CUDA: rows read before they are written": (
        "csrc/cuda/attention.cuh",
        "  __syncwarp();\n#pragma unroll\n  for (int i = 0; i < kWarpRows",
        "#pragma unroll\n  for (int i = 0; i < kWarpRows",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: matrices loaded as they lie": (
        "csrc/cuda/attention.cuh",
        "load_matrices_transposed<T>(",
        "load_matrices<T>(",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: bits of another key": (
        "csrc/cuda/attention.cuh",
        "__shfl_xor_sync(kWholeWarp, w.word[i], 4)",
        "__shfl_xor_sync(kWholeWarp, w.word[i], 8)",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: rows of the next sequence": (
        "csrc/cuda/attention.cuh",
        "first + row < from.length, from.row",
        "true, from.row",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: dq: the next tile is not waited for": (
        "csrc/cuda/attention_bwd.cuh",
        "c);\n    }\n    copy_async_wait<0>();\n    __syncthreads();",
        "c);\n    }\n    __syncthreads();",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: dq: barrier between tiles": (
        "csrc/cuda/attention_bwd.cuh",
        "c);\n    }\n    copy_async_wait<0>();\n    __syncthreads();",
        "c);\n    }\n    copy_async_wait<0>();\n",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: dq: window": (
        "csrc/cuda/attention_bwd.cuh",
        "if (!all && !sees(a, query + 8 * h, key + 8 * j + i % 2, keys.length)) p = 0.0f;",
        "",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: delta": (
        "csrc/cuda/attention_bwd.cuh",
        "p * (gradient - delta)",
        "p * gradient",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: dkv: the next tile is not waited for": (
        "csrc/cuda/attention_bwd.cuh",
        "= next;\n    copy_async_wait<0>();\n",
        "= next;\n",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: dkv: barrier between tiles": (
        "csrc/cuda/attention_bwd.cuh",
        "= next;\n    copy_async_wait<0>();\n    __syncthreads();",
        "= next;\n    copy_async_wait<0>();\n",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: dkv: window": (
        "csrc/cuda/attention_bwd.cuh",
        "if (!all && !sees(a, first + query, key + 8 * h, own.length)) weight = 0.0f;",
        "",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: dkv: statistics of the next queries": (
        "csrc/cuda/attention_bwd.cuh",
        "    if (thread < kQueries) statistics[(stage ^ 1) * kQueries + thread] = next;\n",
        "",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: dropped scores keep a gradient": (
        "csrc/cuda/attention_bwd.cuh",
        "gradient = keep ? gradient * a.dropout.scale : 0.0f;",
        "gradient = gradient * a.dropout.scale;",
        "tests/kernels/test_cuda_emulated_attention.py",
    ),
    "CUDA: terms of own rows are not turned to their pairs": (
        "csrc/cuda/disentangled_attention.cuh",
        "add(s, turn_rows(merge<OwnRun>(above, below)));",
        "add(s, merge<OwnRun>(above, below));",
        "tests/kernels/test_cuda_emulated_disentangled_attention.py",
    ),
    "CUDA: runs of the other side's distances overlap": (
        "csrc/cuda/disentangled_attention.cuh",
        "return distance + column < 16;",
        "return distance + column <= 16;",
        "tests/kernels/test_cuda_emulated_disentangled_attention.py",
    ),
    "CUDA: distances of keys taken for those of queries": (
        "csrc/cuda/disentangled_attention.cuh",
        "from_keys ? -distance : distance",
        "distance",
        "tests/kernels/test_cuda_emulated_disentangled_attention.py",
    ),
    "CUDA: rows of a band overwritten before they are read": (
        "csrc/cuda/disentangled_attention.cuh",
        "kOwnRuns + 2 * kOtherRuns, kOwnsKeys>",
        "kOwnRuns + kOtherRuns, kOwnsKeys>",
        "tests/kernels/test_cuda_emulated_disentangled_attention.py",
    ),
    "CUDA: gradients of both runs from one of a table": (
        "csrc/cuda/disentangled_attention.cuh",
        "own_.rows(), own_.place(run + i));",
        "own_.rows(), own_.place(run));",
        "tests/kernels/test_cuda_emulated_disentangled_attention.py",
    ),
    "CUDA: sums of positions: the next rows are not waited for": (
        "csrc/cuda/disentangled_attention_positions.cuh",
        "    copy_async_wait<0>();\n    __syncthreads();  // the next rows",
        "    __syncthreads();  // the next rows",
        "tests/kernels/test_cuda_emulated_disentangled_attention.py",
    ),
    "CUDA: sums of positions: barrier between pieces": (
        "csrc/cuda/disentangled_attention_positions.cuh",
        "    __syncthreads();  // the next rows are there, and these may be overwritten\n",
        "",
        "tests/kernels/test_cuda_emulated_disentangled_attention.py",
    ),
    "CUDA: sums of positions: keys behind the last": (
        "csrc/cuda/disentangled_attention_positions.cuh",
        "      if (first_key + key >= piece.length) p = 0.0f;\n",
        "",
        "tests/kernels/test_cuda_emulated_disentangled_attention.py",
    ),
    "CUDA: sums of positions: not scaled": (
        "csrc/cuda/disentangled_attention_positions.cuh",
        "= sums[j][2 * h + e] * a.softmax_scale;",
        "= sums[j][2 * h + e];",
        "tests/kernels/test_cuda_emulated_disentangled_attention.py",
    ),
    "CUDA: sums of positions: a sequence in two parts": (
        "csrc/cuda/disentangled_attention_positions.cuh",
        "sequence < sequences; sequence += step) {",
        "sequence < sequences; ++sequence) {",
        "tests/kernels/test_cuda_emulated_disentangled_attention.py",
    ),
    "CUDA: second diagonal of a distance forgotten": (
        "csrc/cuda/disentangled_attention.cu",
        "  if (below < sums.diagonals) sum += part[(below * 32 + rest) * row_step];\n",
        "",
        "tests/kernels/test_cuda_emulated_disentangled_attention.py",
    ),
    "CUDA: distances beyond the last bucket forgotten": (
        "csrc/cuda/disentangled_attention.cu",
        "end == 2 * p.reach + 1 ? furthest : min(last, furthest)",
        "min(last, furthest)",
        "tests/kernels/test_cuda_emulated_disentangled_attention.py",
    ),
    "CUDA: barrier before slices of distances are read": (
        "csrc/cuda/disentangled_attention.cu",
        "of_slices[slice * kColumns + lane] = sum;\n    __syncthreads();\n",
        "of_slices[slice * kColumns + lane] = sum;\n",
        "tests/kernels/test_cuda_emulated_disentangled_attention.py",
    ),
    "CUDA: barrier after slices of distances were read": (
        "csrc/cuda/disentangled_attention.cu",
        "    __syncthreads();  // the columns before these have been read\n",
        "",
        "tests/kernels/test_cuda_emulated_disentangled_attention.py",
    ),
    "CUDA: rows of unpad from the wrong side": (
        "csrc/cuda/unpad.cu",
        "(kScatter ? row : index) * words",
        "row * words",
        "tests/ops/test_unpad.py",
    ),
    "CUDA: last word of a row forgotten": (
        "csrc/cuda/unpad.cu",
        "i < words; i += 32",
        "i < words - 1; i += 32",
        "tests/ops/test_unpad.py",
    ),
    "CUDA: index outside of unpad not checked": (
        "csrc/cuda/unpad.cu",
        "  check_index(index, a.longer_rows);\n",
        "",
        "tests/ops/test_unpad.py",
    ),
    "CUDA: both halves of a run by one call": (
        "csrc/cuda/philox.cu",
        "first_call + half",
        "first_call",
        "tests/ops/test_philox.py",
    ),
    "CUDA: words of the lower queries": (
        "csrc/cuda/philox.cu",
        "score_word(8 * lower, i)",
        "score_word(0, i)",
        "tests/ops/test_philox.py",
    ),
    "one call: classes are not compared": (
        "csrc/cpu/identities.cpp",
        "have_types(objects, types) && hold_values",
        "hold_values",
        "tests/models/test_prepared.py",
    ),
    "one call: layouts are not compared": (
        "csrc/cpu/prepared_model.cpp",
        "now.strides() == strides",
        "true",
        "tests/models/test_prepared.py",
    ),
    "one call: ids outside of the tables": (
        "csrc/cpu/prepared_model.cpp",
        "return i >= 0 && i < rows;",
        "return true;",
        "tests/models/test_prepared.py",
    ),
    "one call: position 0 is padding": (
        "csrc/cpu/prepared_model.cpp",
        "if (needs_first && !real.starts_are_real) return {};",
        "",
        "tests/models/test_prepared.py",
    ),
    "encoder: keys lie as if all rows were real": (
        "csrc/cpu/encoder.cpp",
        "task.first_k = task.first_q;",
        "(void)task;",
        "tests/ops/test_encoder.py",
    ),
    "matmul: packed weights cut short": (
        "csrc/cpu/gemm.cpp",
        "packed.numel() == size_of_packed(h.used, h.depth, h.columns)",
        "true",
        "tests/ops/test_linear.py",
    ),
    "int8: outliers are quantised too": (
        "csrc/cpu/int8_kernel.h",
        "select(beyond, zero, v * factor)",
        "v * factor",
        "tests/ops/test_quantized_linear.py",
    ),
    "int8: units of the other half of a block": (
        "csrc/cpu/int8_kernel.h",
        "const Vec units = load(halves + 16 * half);",
        "const Vec units = load(halves + 16 - 16 * half);",
        "tests/ops/test_quantized_linear.py",
    ),
    "int8: rows moved up keep what was added": (
        "csrc/cpu/int8_kernel.h",
        "_mm512_sub_epi32(sums[r][0], extra[0])",
        "sums[r][0]",
        "tests/ops/test_quantized_linear.py",
    ),
    "matmul: the rows of the task before": (
        "csrc/cpu/gemm.cpp",
        "if (first != held) {",
        "if (held < 0) {",
        "tests/ops/test_encoder.py",
    ),
    "matmul: half a block for 17 rows": (
        "csrc/cpu/gemm.cpp",
        "rows <= kBlock / 2;",
        "rows <= kBlock / 2 + 1;",
        "tests/ops/test_linear.py",
    ),
}
CUDA_TESTS = "tests/kernels/test_cuda_emulated.py"
COPIED = (
    "fastbert",
    "kernels",
    "csrc",
    "tests",
    "benchmarks",
    "examples",
    "docs",
    "setup.py",
    "pyproject.toml",
    "README.md",
)


def copy_source(folder: Path) -> None:
    """The parts of the checkout that tests read, the compiled part among them."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignore)
        else:
            shutil.copy(source, folder / name)


def run_tests(folder: Path, *tests: str) -> subprocess.CompletedProcess:
    """The tests on the copy, whose `fastbert` comes before the installed one."""
    installed_kernels = folder / "fastbert" / "kernels"
    shutil.rmtree(installed_kernels, ignore_errors=True)
    shutil.copytree(folder / "kernels", installed_kernels)
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def is_cuda(file: str) -> bool:
    return file.startswith("csrc/cuda")


def build(folder: Path, file: str) -> None:
    """Compiles what has changed in the copy, of the part that `file` belongs to."""
    part = "cuda_emulated" if is_cuda(file) else "cpu"
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    command += ["--build-temp", f"build/{part}"]
    environment = {**os.environ, "FASTBERT_BUILD": part}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)


def tests_of(name: str) -> tuple[str, ...]:
    """What pytest is told to run for a fault."""
    file, _, _, tests = FAULTS[name]
    return (tests, CUDA_TESTS, "-k", "cuda_emulated") if is_cuda(file) else (tests,)


def bite(folder: Path, name: str) -> str | None:
    """Injects the fault and returns what is wrong with the suite, None if it noticed."""
    file, right, wrong, tests = FAULTS[name]
    path = folder / file
    source = path.read_text()
    if source.count(right) != 1:
        return f"the text of this fault stands {source.count(right)} times in {file}"
    path.write_text(source.replace(right, wrong))
    if file.startswith("csrc"):
        build(folder, file)
    run = run_tests(folder, *tests_of(name))
    path.write_text(source)
    if run.returncode == 0:
        return f"{tests} passed"
    if run.returncode < 0:  # by a signal: memory that is not the kernel's was written
        return None
    if "failed" not in run.stdout:
        return f"{tests} did not run: {(run.stdout + run.stderr)[-400:]}"
    return None


def order(name: str) -> tuple[bool, bool]:
    """Python first, then C++, then CUDA."""
    file = FAULTS[name][0]
    return file.startswith("csrc"), is_cuda(file)


def main() -> int:
    names = sorted(sys.argv[1:] or FAULTS, key=order)
    unnoticed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_source(folder)
        of_cuda = [name for name in names if is_cuda(FAULTS[name][0])]
        if of_cuda:
            build(folder, "csrc/cuda")
        for group in (of_cuda, [name for name in names if name not in of_cuda]):
            wanted = dict.fromkeys(word for name in group for word in tests_of(name))
            whole = run_tests(folder, *wanted) if group else None
            if whole is not None and whole.returncode != 0:
                print(f"the suite fails without a fault:\n{whole.stdout[-2000:]}")
                return 1
        for name in names:
            problem = bite(folder, name)
            unnoticed += problem is not None
            print(
                f"{'noticed' if problem is None else 'NOT NOTICED':12} {name} {problem or ''}",
                flush=True,
            )
    print(f"{len(names) - unnoticed} of {len(names)} faults noticed")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())
