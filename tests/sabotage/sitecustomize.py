"""On PYTHONPATH, this module plants a fault in every Python process; the environment variable SABOTAGE names the fault.

"failed_comparison": no two runs can be interleaved, as if a comparison took longer than its time limit.
"refused_estimate": no training can be traced on fake tensors, as with an untested library.
"ignored_checkpointing": a transformers that accepts gradient checkpointing and silently does nothing about it.
"fp32_states": a bitsandbytes whose 8-bit optimizers keep their states in fp32.
"summed_gradients": a Trainer that divides losses by one micro-batch's number of labels, not by the effective batch's.
"slow_step": after each optimizer step, code computes for SLOWER (an environment variable) times a training step's time.
"sleeping_step": after each optimizer step, the process sleeps for the same time.
"leaked_activation": a BERT whose forward passes each leave an activation behind.
"plain_attention": a torch whose fused attention is plain arithmetic.
"copied_batches": a DataLoader that keeps a copy of each batch until it fetches the next one.
"""

import importlib.machinery
import os
import sys


def failed_comparison(module):
    def refuse(*_, **__):
        return module.Outcome("timed out", "no result within 0 s")

    module.alternate = module.side_by_side = refuse


def refused_estimate(module):
    def follow(*_, **__):
        raise RuntimeError("this version is not known")

    module.follow = follow


def ignored_checkpointing(module):
    module.PreTrainedModel._set_gradient_checkpointing = lambda self, *_, **__: None


def fp32_states(module):
    configure = module.Optimizer8bit.get_config

    def of_32_bits(self, *arguments):
        return configure(self, *arguments) | {"optim_bits": 32}

    module.Optimizer8bit.get_config = of_32_bits


def summed_gradients(module):
    count = module.Trainer._get_num_items_in_batch

    def of_one(self, batches, device):
        found = count(self, batches, device)
        return found if found is None else found // len(batches)

    module.Trainer._get_num_items_in_batch = of_one


def _slowed(module, wait):
    import time

    share, ended = float(os.environ["SLOWER"]), []

    def longer(*_):
        if ended:
            wait(share * (time.perf_counter() - ended.pop()))
        ended.append(time.perf_counter())

    module.register_optimizer_step_post_hook(longer)


def slow_step(module):
    import time

    def compute(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    _slowed(module, compute)


def sleeping_step(module):
    import time

    _slowed(module, time.sleep)


def leaked_activation(module):
    forward, kept = module.BertModel.forward, []

    def leaking(self, *arguments, **options):
        found = forward(self, *arguments, **options)
        kept.append(found.last_hidden_state.detach())
        return found

    module.BertModel.forward = leaking


def plain_attention(module):
    def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        import torch

        scores = query @ key.transpose(-2, -1) * (scale or query.size(-1) ** -0.5)
        if is_causal:
            scores = scores + torch.full(scores.shape[-2:], float("-inf")).triu(1)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros(attn_mask.shape).masked_fill(~attn_mask, float("-inf"))
        scores = scores if attn_mask is None else scores + attn_mask
        return module.dropout(scores.softmax(-1), dropout_p) @ value

    module.scaled_dot_product_attention = attend


def copied_batches(module):
    fetch = module._MapDatasetFetcher.fetch

    def twice(self, indices):
        batch = fetch(self, indices)
        self.copy = {name: value.clone() for name, value in batch.items()}
        return batch

    module._MapDatasetFetcher.fetch = twice


WAYS = {
    "failed_comparison": ("trainmem.measure.processes", failed_comparison),
    "refused_estimate": ("trainmem.estimate.trace", refused_estimate),
    "ignored_checkpointing": ("transformers.modeling_utils", ignored_checkpointing),
    "fp32_states": ("bitsandbytes.optim.optimizer", fp32_states),
    "summed_gradients": ("transformers.trainer", summed_gradients),
    "slow_step": ("torch.optim.optimizer", slow_step),
    "sleeping_step": ("torch.optim.optimizer", sleeping_step),
    "leaked_activation": ("transformers.models.bert.modeling_bert", leaked_activation),
    "plain_attention": ("torch.nn.functional", plain_attention),
    "copied_batches": ("torch.utils.data._utils.fetch", copied_batches),
}
TARGET, SPOIL = WAYS.get(os.environ.get("SABOTAGE"), (None, None))


class Saboteur(importlib.machinery.PathFinder):
    """Find modules as usual, and plant the fault in the target module once it is imported."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target) if name == TARGET else None
        if spec:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                SPOIL(module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Saboteur)
