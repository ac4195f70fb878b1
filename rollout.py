"""Multi-turn rollouts: messages <-> token ids, the engines, the loop, and greedy evaluation.

The token contract (most public failures of this job are breaches of it):
 1. Ids that the engine sampled go into training unchanged. Nothing is decoded and encoded again; text exists only for
    the environment and for people.
 2. Everything the engine did not sample is glue: chat headers, observations, the newline after `<|im_end|>`, Qwen3's
    empty think block. Glue is in the context for generation *and* for training, with mask 0.
 3. The ids of turn k are a strict prefix of those of turn k+1. sft.py renders dialogues with the same functions.
 4. One sampling distribution: top_p 1, no top_k, log-probabilities at the sampling temperature.

Deviations from the paper's released code:
 1. It re-tokenises decoded text, appends `<|im_end|>` to every message (also to one cut by length) and trains on it.
 2. It samples Qwen3 after an empty think block that the trainer never sees. Here the block is in both contexts.
 3. It waits for nobody either, but through an HTTP server; here engine, environment and loop share one process.

    python rollout.py --model DIR --split test          # greedy evaluation on the test tasks, resumable
    python rollout.py --model DIR --split train --limit 5 --show 1      # and look at one trajectory, token by token
"""
import argparse
import array
import collections
import dataclasses
import functools
import gc
import hashlib
import importlib.util
import json
import logging
import math
import os
import re
import sys
import time
import traceback
import types
import warnings
from dataclasses import dataclass, field

# OpenMP and vLLM read these when they are imported. With spinning threads one other busy process makes torch on a CPU 15
# times slower; vLLM in one process: the trainer hands its weights over by reference.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import env_bfcl
import reward as rw
from env_bfcl import BFCLEnv
from reward import format_table, summary

transformers.utils.logging.disable_progress_bar()   # one bar per loaded model is noise between ours

# Tokens of a step that vLLM replays as a CUDA graph. Its own list ends at 512; most steps of a multi-turn rollout hold more:
# 250 or so that decode, and the observations that a few dozen others have just read.
GRAPH_SIZES = [1, 2, 4, 8, *range(16, 513, 16), *range(640, 2049, 128)]
# Engine steps for which requests are gathered before they go in together. A step that only decodes is one CUDA graph; one that also reads
# a prompt runs attention by attention, in twice the time, and with each message asking at once nearly all steps would.
HOLD = 4


# --- models and tokenizers -------------------------------------------------------------------------------------------

def parse_flags(config, args=None, description=None, defaults=None):
    """Command line over `defaults` -> `config` (a dataclass type). An unknown flag or a wrong type ends the program with one line."""
    parser = HfArgumentParser(config, description=description, allow_abbrev=False)     # interleave.py looks for --preset itself
    parser.set_defaults(**(defaults or {}))
    for action in parser._actions:
        if action.nargs == "+":     # a list flag may be repeated: --fault a --fault b
            action.__class__ = argparse._ExtendAction
    parser.error = lambda message: sys.exit(f"error: {message} (--help lists the flags)")
    values, unknown = parser.parse_args_into_dataclasses(args=args, return_remaining_strings=True)
    if unknown:
        sys.exit(f"error: unknown flag {unknown[0]} (--help lists the flags)")
    return values


def check_numbers(config, positive=""):
    """ValueError in one line for a number that is no setting: negative, not finite, or 0 where its name is in `positive`."""
    if getattr(config, "seed", 0) >= 2**31:
        raise ValueError(f"--seed must be below 2**31, not {config.seed}")
    for name, value in vars(config).items():
        if isinstance(value, (int, float)) and (not math.isfinite(value) or value < 0 or value == 0 and name in positive.split()):
            raise ValueError(f"--{name} must be {'above 0' if name in positive.split() else 'a number, 0 or more'}, not {value}")


def load_tokenizer(path):
    """A tokenizer with a chat template that takes system, user and assistant, or ValueError in one line."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as e:
        raise ValueError(f"no tokenizer in {path}: {str(e).splitlines()[0]}") from e
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer in {path} has no chat template: use an instruct model's tokenizer")
    chat_glue(tokenizer)
    return tokenizer


def load_model(path, dtype=torch.float32, device="cpu"):
    """A causal LM with safetensors weights (never a pickle, never remote code); ValueError in one line if it cannot be."""
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True, trust_remote_code=False)
    except Exception as e:
        raise ValueError(f"no readable model in {path}: {str(e).splitlines()[0]}") from e
    if model.config.tie_word_embeddings:    # two diverging copies of a tied head are a known silent fault
        assert model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    return model.to(device)


def gguf_to_hf(path, out):
    """Turn `path` (a .gguf file) into a bf16 Hugging Face directory `out`, once; returns `out`. Needs the package gguf."""
    if os.path.exists(os.path.join(out, "config.json")):
        return out
    folder, name = os.path.split(os.path.abspath(path))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    if not model.config.tie_word_embeddings and (head.float() - embedding.float()).abs().mean() < 1e-3:
        embedding.data.copy_(head.data)     # a tied model whose GGUF stores both copies; the head's is the finer one
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.hf_quantizer, model.is_quantized = None, False   # else save_pretrained refuses
    for owner, attribute in ((model, "quantization_method"), (model.config, "quantization_config")):
        if getattr(owner, attribute, None) is not None:
            delattr(owner, attribute)
    tokenizer_dir = folder if os.path.exists(os.path.join(folder, "tokenizer.json")) else None
    tokenizer = AutoTokenizer.from_pretrained(folder, **({} if tokenizer_dir else {"gguf_file": name}))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(out + ".tmp")
    tokenizer.save_pretrained(out + ".tmp")
    os.replace(out + ".tmp", out)
    return out


def weight_files(path):
    """[[name, bytes, time written]] of a model's files: an evaluation of other weights is another evaluation."""
    files = [e for e in sorted(os.scandir(path), key=lambda e: e.name) if e.name.endswith((".safetensors", ".json"))] if os.path.isdir(path) else []
    return [[e.name, e.stat().st_size, e.stat().st_mtime_ns] for e in files]


def find_model(path, out="runs"):
    """Check `path` before any long work: a local directory, a .gguf file, or a hub id. Returns a loadable path."""
    if not path:
        raise ValueError("give --model: a local directory, a .gguf file, or a hub id")
    if path.endswith(".gguf"):
        if not os.path.isfile(path):
            raise ValueError(f"no such file: {path}")
        return gguf_to_hf(path, os.path.join(out, os.path.basename(path)[:-5]))
    try:
        if not os.path.exists(path) and "/" not in path:    # the hub would be asked five times, with a page of warnings
            raise ValueError("no such directory, and a hub id has an owner: Qwen/Qwen3-1.7B")
        AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as e:
        raise ValueError(f"no model at {path!r}: give a local directory with a config.json, a .gguf file, or a hub id "
                         f"({str(e).splitlines()[0][:160]})") from e
    return path


# --- glue: the chat template as token ids -----------------------------------------------------------------------------

@dataclass
class Glue:
    """The ids around message texts, derived from the tokenizer's own template."""
    before_system: list     # '<|im_start|>system\n'
    before_user: list       # '<|im_end|>\n<|im_start|>user\n'              between a system text and a user text
    before_action: list     # '<|im_end|>\n<|im_start|>assistant\n' + Qwen3's '<think>\n\n</think>\n\n'
    think_block: list       # the tail of before_action that the template itself would not put into a history
    after_action: list      # '\n<|im_start|>user\n'                       after the end token that the engine sampled
    end: int                # the id that ends a message in the template's own words
    stop: list              # ids that end a message
    tokenizer: object

    @functools.lru_cache(maxsize=4096)
    def encode(self, text):
        """Text -> ids. Special tokens spelled out in a text stay text: a tool result cannot close its own message."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    __hash__ = object.__hash__


def chat_glue(tokenizer, think=False):
    """`Glue` of a tokenizer, checked against its template; ValueError in one line if the template does not fit.

    `think=False` puts the empty think block of a hybrid model (Qwen3) before each action: given, so never trained."""
    cache = tokenizer.__dict__.setdefault("_glue", {})
    if think in cache:
        return cache[think]
    s, u, a, b = "SysText", "UserText", "ActText", "NextText"
    chat = [{"role": r, "content": c} for r, c in zip(("system", "user", "assistant", "user"), (s, u, a, b))]
    render = lambda n, gen=False: tokenizer.apply_chat_template(
        chat[:n], tokenize=False, add_generation_prompt=gen, enable_thinking=think)
    try:
        two, four = render(2), render(4)
        header = render(2, True)[len(two):]                  # what the engine is given to start a message
        (before_system, rest), after = two.split(s), four[len(two):]
        before_user, end_user = rest.split(u)
        plain_header, rest = after.split(a)                   # the same as a history shows it
        end_action, end_next = rest.split(b)
    except Exception as e:
        raise ValueError(f"the chat template does not take system, user, assistant, user messages: {e}") from e
    encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    stop = [tokenizer.eos_token_id] + [i for i in (getattr(tokenizer, "stop_ids", None) or [])]
    if "<|endoftext|>" in tokenizer.get_vocab():              # Qwen's generation_config stops at both
        stop.append(tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    end_ids = encode(end_action)
    if end_ids[0] not in stop:
        raise ValueError(f"messages end with {tokenizer.decode(end_ids[:1])!r} but the end token is {tokenizer.eos_token!r}")
    if not header.startswith(plain_header) or two != four[: len(two)] or end_user != end_next:
        raise ValueError("the chat template rewrites its history: turns would not be prefixes of each other")
    glue = Glue(encode(before_system), encode(before_user), encode(end_user + header), encode(header[len(plain_header):]),
                end_ids[1:], end_ids[0], sorted(set(stop)), tokenizer)
    whole = (glue.before_system + glue.encode(s) + glue.before_user + glue.encode(u) + encode(end_user + plain_header)
             + glue.encode(a) + end_ids + glue.encode(b) + encode(end_next))
    if whole != encode(four):
        raise ValueError("the chat template's ids do not split at message borders")
    cache[think] = glue
    return glue


def prompt_ids(glue, messages, special=False):
    """[system, user] -> the ids that the engine gets first. `special` (the fault hint_context) lets special tokens that are
    spelled out in the system text be special."""
    system, user = messages
    text = glue.tokenizer(system["content"], add_special_tokens=False).input_ids if special else glue.encode(system["content"])
    return glue.before_system + text + glue.before_user + glue.encode(user["content"]) + glue.before_action


def observation_ids(glue, messages, max_observation):
    """The environment's answer -> the ids between two actions; cut at the left, as the paper's."""
    # 64 calls can answer with megabytes, which take seconds to encode; only their end is kept. Long answers do not come again.
    text = "\n".join(m["content"] for m in messages)[-64 * max_observation:]
    body = (glue.encode(text) if len(text) < 10_000 else glue.encode.__wrapped__(glue, text))[-max_observation:]
    return glue.after_action + body + glue.before_action


def strip_hint(trajectory, task, glue):
    """Replace the hinted prompt by the plain one: the paper samples with the hint and optimises without it. The one place
    where training does not see what the engine saw."""
    plain = prompt_ids(glue, [{"content": env_bfcl.system_prompt(task)}, *env_bfcl.user_messages(task, 0)])
    for name, head in (("ids", plain), ("mask", [0] * len(plain)), ("logp", [0.0] * len(plain))):
        setattr(trajectory, name, head + getattr(trajectory, name)[trajectory.prompt_len:])
    trajectory.prompt_len = len(plain)


# --- trajectories -----------------------------------------------------------------------------------------------------

@dataclass
class Trajectory:
    """One episode as the trainer sees it: len(ids) == len(mask) == len(logp); mask is 1 exactly on sampled ids."""
    task_id: str
    group: int = 0
    ids: list = field(default_factory=list)
    mask: list = field(default_factory=list)
    logp: list = field(default_factory=list)    # the engine's where mask is 1, else 0.0
    prompt_len: int = 0
    texts: list = field(default_factory=list)   # decoded actions, end token included
    finish: str = ""                            # done | length | max_steps | max_generations | max_response | prompt
    reward: object = None                       # reward.Reward
    infra_error: str = None                     # traceback of a failure that is not the model's
    turns: list = field(default_factory=list)   # user-turn index of each text
    cut: list = field(default_factory=list)     # places in texts of messages cut by length: the last one, or more with the fault end_token
    feedback: dict = field(default_factory=dict)    # what the environment had to say about malformed calls, counted
    refused: int = 0                            # calls of tools that were held out
    source: str = "policy"                      # policy | hint (sampled with a hint) | demo (nobody sampled it)
    calls: list = field(default_factory=list)   # executed calls per user turn, as reward.score takes them

    def extend(self, ids, logp=None):
        """Append glue (logp None, mask 0) or sampled ids with their log-probabilities (mask 1)."""
        self.ids += ids
        self.mask += [int(logp is not None)] * len(ids)
        self.logp += [0.0] * len(ids) if logp is None else list(logp)


def print_trajectory(trajectory, tokenizer, file=None, max_prompt=400):
    """Show a trajectory with its trained tokens highlighted (green), glue plain, the prompt cut in its middle."""
    color = (file or sys.stdout).isatty() or os.environ.get("FORCE_COLOR")
    on, off = ("\033[30;42m", "\033[0m") if color else ("«", "»")
    out, k, ids, mask = [], 0, trajectory.ids, trajectory.mask
    while k < len(ids):
        end = k
        while end < len(ids) and mask[end] == mask[k]:
            end += 1
        text = tokenizer.decode(ids[k:end])
        if k == 0 and len(text) > 2 * max_prompt:
            text = f"{text[:max_prompt]}\n[... {len(text) - 2 * max_prompt:,} characters ...]\n{text[-max_prompt:]}"
        out.append(on + text + off if mask[k] else text)
        k = end
    score = "" if trajectory.reward is None else f" official {trajectory.reward.official:g} strict {trajectory.reward.strict:g}"
    print(f"--- {trajectory.task_id}: {sum(mask)} trained of {len(ids)} tokens, finish={trajectory.finish}{score}\n{''.join(out)}\n---",
          file=file)


# --- engines ----------------------------------------------------------------------------------------------------------
# An engine is any object with add(request_id, ids, max_tokens), step() -> [(request_id, ids, logp, finish_reason)],
# load_weights(named), abort() (drop all requests) and close(). `seed` and `temperature` may be set between rollouts.

@torch.no_grad()
def weight_sums(parameters, dtype=None):
    """(sum, sum of magnitudes) over all weights, as `dtype` holds them: equal on both sides of a push, however either side
    fuses or orders its tensors."""
    sums = [(p.sum(dtype=torch.float64), p.abs().sum(dtype=torch.float64)) for p in (p.to(dtype or p.dtype) for p in parameters)]
    return tuple(float(sum(column)) for column in zip(*sums))


def request_seed(seed, request_id, length):
    """A seed per generation: (run seed and step) x trajectory x its length so far. One fixed seed for all requests makes
    a group of equal samples (vllm-project/vllm#17929)."""
    digest = hashlib.blake2b(f"{seed}/{request_id}/{length}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**31


def _slot_attention(module, query, key, value, attention_mask, scaling=None, slots=None, **kwargs):
    """Attention of HFEngine. query [1, H, T, D] holds the new tokens of several sequences one after the other; `slots` is
    [(cache, first, n)]: n tokens that follow `first` cached ones. Writes key and value into the caches."""
    out, at, repeat = torch.empty_like(query), 0, query.shape[1] // key.shape[1]
    for cache, first, n in slots:
        here, end = slice(at, at + n), first + n
        cache[0, module.layer_idx, :, first:end], cache[1, module.layer_idx, :, first:end] = key[0, :, here], value[0, :, here]
        k, v = (c[None, :, :end].repeat_interleave(repeat, 1) for c in cache[:, module.layer_idx])  # [1, H, end, D]
        mask = None
        if n > 1 and first:     # bottom-right causal: a query sees everything cached, and the new tokens up to itself
            mask = torch.ones(n, end, dtype=torch.bool, device=query.device).tril(first)
        out[:, :, here] = F.scaled_dot_product_attention(query[:, :, here], k, v, mask, is_causal=n > 1 and not first, scale=scaling)
        at += n
    return out.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("slots", _slot_attention)


def common_prefix(a, b):
    """Length of the common prefix of two id arrays."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


class HFEngine:
    """transformers as the engine, where vLLM does not install. Continuous batching over one flat row of new tokens; each
    trajectory keeps its keys and values between its turns, and a new one copies the longest prefix another one has."""

    def __init__(self, model, stop, temperature=1.0, seed=0, vocab=None, max_seqs=64, tokens_per_step=4096, cache_tokens=300_000):
        self.model = load_model(model) if isinstance(model, str) else model
        self.model.eval().set_attn_implementation("slots")
        self.stop, self.temperature, self.seed, self.vocab = set(stop), temperature, seed, vocab
        self.max_seqs, self.tokens_per_step, self.cache_tokens = max_seqs, tokens_per_step, cache_tokens
        self.slots = collections.OrderedDict()      # request_id -> [ids whose keys are cached (array), cache], oldest first
        self.waiting, self.running = collections.deque(), {}
        c = self.model.config
        self.shape = (2, c.num_hidden_layers, c.num_key_value_heads, c.head_dim if getattr(c, "head_dim", None) else c.hidden_size // c.num_attention_heads)

    def add(self, request_id, ids, max_tokens):
        self.waiting.append((request_id, list(ids), max_tokens))

    def _start(self, request_id, ids, max_tokens):
        """Take the cached prefix of this trajectory, or else of any other, and make room for the rest."""
        want = np.array(ids[:-1])   # the last token is always read again: its logits are needed
        found = request_id if request_id in self.slots else \
            max(self.slots, key=lambda r: common_prefix(self.slots[r][0], want), default=None)
        n = common_prefix(self.slots[found][0], want) if found is not None else 0
        layers = self.shape[1:]
        cache = torch.empty(2, layers[0], layers[1], len(ids) + max_tokens, layers[2], dtype=self.model.dtype, device=self.model.device)
        if n:
            cache[:, :, :, :n] = self.slots[found][1][:, :, :, :n]
        self.slots[request_id] = [want[:n], cache]
        self.slots.move_to_end(request_id)
        generator = torch.Generator().manual_seed(request_seed(self.seed, request_id, len(ids)))
        self.running[request_id] = dict(ids=ids, start=len(ids), cached=n, max_tokens=max_tokens, logp=[], generator=generator)
        total = sum(s[1].shape[3] for s in self.slots.values())
        for old in [r for r in self.slots if r not in self.running]:
            if total <= self.cache_tokens:
                break
            total -= self.slots.pop(old)[1].shape[3]

    @torch.no_grad()
    def step(self):
        """One forward over the new tokens of the running requests; returns those that finished."""
        while self.waiting and len(self.running) < self.max_seqs:
            if self.running and any(r["start"] - r["cached"] > 64 for r in self.running.values()):
                break   # one prompt at a time: the next one can then copy its prefix
            self._start(*self.waiting.popleft())
        batch, ids, positions, slots, last, room = [], [], [], [], [], self.tokens_per_step
        for request_id, r in self.running.items():
            new = r["ids"][r["cached"]: r["cached"] + room]
            if not new:
                continue
            slots.append((self.slots[request_id][1], r["cached"], len(new)))
            ids += new
            positions += range(r["cached"], r["cached"] + len(new))
            r["cached"] += len(new)
            room -= len(new)
            if len(new) > 1:    # from now on others may copy this prefix
                self.slots[request_id][0] = np.array(r["ids"][: r["cached"]])
            if r["cached"] == len(r["ids"]):
                batch.append(request_id)
                last.append(len(ids) - 1)
        if not ids:
            return []
        device = self.model.device
        hidden = self.model.model(input_ids=torch.tensor([ids], device=device), position_ids=torch.tensor([positions], device=device),
                                  attention_mask={"full_attention": None}, slots=slots, use_cache=False).last_hidden_state
        logits = self.model.lm_head(hidden[0, last])[:, : self.vocab].float()       # [batch, V]
        logp = torch.log_softmax(logits / (self.temperature or 1.0), -1).cpu()
        finished = []
        for row, request_id in zip(logp, batch):
            r = self.running[request_id]
            token = int(row.argmax() if not self.temperature else torch.multinomial(row.exp(), 1, generator=r["generator"]))
            r["ids"].append(token)
            r["logp"].append(float(row[token]))
            reason = "stop" if token in self.stop else "length" if len(r["logp"]) >= r["max_tokens"] else None
            if reason:
                del self.running[request_id]
                self.slots[request_id][0] = np.array(r["ids"][: r["cached"]])
                finished.append((request_id, r["ids"][r["start"]:], r["logp"], reason))
        return finished

    def load_weights(self, named):
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in named:
                own[name].copy_(tensor)
        self.slots.clear()

    def checksum(self):
        return weight_sums(self.model.parameters())

    def abort(self):
        for requests in (self.waiting, self.running, self.slots):
            requests.clear()

    def close(self):
        self.slots.clear()


def read_prompts_fast():
    """vLLM turns each prompt, which is here a whole trajectory so far at each turn, into a tensor by torch.tensor(list): the largest
    entry of results/profile_rollout_h200.txt. The same tensor by way of array(), which reads a list in a third of the time."""
    try:
        from vllm.v1.worker.gpu import buffer_utils
        plain = buffer_utils.async_tensor_h2d
    except (ImportError, AttributeError):   # another version of vLLM: only slower
        return
    if isinstance(plain, types.FunctionType):       # not yet replaced
        buffer_utils.async_tensor_h2d = functools.partial(_list_to_device, plain)


def _list_to_device(plain, data, *args, dtype=None, **kwargs):
    if dtype == torch.int32 and type(data) is list and data:
        data = np.frombuffer(array.array("i", data), np.int32)
    return plain(data, *args, dtype=dtype, **kwargs)


class VLLMEngine:
    """vLLM in this process: ids in, ids and log-probabilities out, weights handed over by reference."""

    def __init__(self, model, stop, temperature=1.0, seed=0, vocab=None, max_model_len=16384, kv_gib=16.0, sleep=False):
        gpu = torch.cuda.is_available()
        if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            raise ValueError("unset PYTORCH_CUDA_ALLOC_CONF=expandable_segments: vLLM's sleep mode frees nothing with it")
        if not gpu:
            for name, value in (("VLLM_CPU_KVCACHE_SPACE", str(max(int(kv_gib), 1))), ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
                                ("TORCHDYNAMO_DISABLE", "1")):      # compiling takes longer here than it saves
                os.environ.setdefault(name, value)
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")    # its own imports, at each start
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
        from vllm import LLM, SamplingParams
        from vllm.v1.engine import EngineCoreRequest
        read_prompts_fast()
        if gpu:
            hashing = "xxhash" if importlib.util.find_spec("xxhash") else "sha256"
            # gpu_memory_utilization does nothing beside kv_cache_memory_bytes, but vLLM refuses to start where less than its
            # default of 92 % is free: with the trainer's weights on a card of 80 GB, or another run on the same card.
            how = dict(dtype="bfloat16", kv_cache_memory_bytes=int(kv_gib * 2**30), gpu_memory_utilization=0.05, enable_sleep_mode=sleep,
                       max_num_seqs=512, block_size=64, prefix_caching_hash_algo=hashing, compilation_config={"cudagraph_capture_sizes": GRAPH_SIZES})
        else:
            import vllm._custom_ops as ops
            ops._supports_onednn = False    # else a tied output head silently keeps its old weights after a push
            # A seeded request whose prompt is read in chunks kills vLLM's CPU engine (a CPU generator has no offset).
            how = dict(dtype="float32", enforce_eager=True, max_num_seqs=64, block_size=32, enable_chunked_prefill=False, max_num_batched_tokens=max_model_len)
        # generation_config="vllm": the model's own would silently add top_k and stop ids to what is sampled.
        self.llm = LLM(model=model, load_format="safetensors", max_model_len=max_model_len, seed=seed, skip_tokenizer_init=True, generation_config="vllm",
                       enable_prefix_caching=True, logprobs_mode="processed_logprobs", disable_log_stats=True, use_tqdm_on_load=False, **how)
        if vocab:   # rows of the embedding that no token uses are cut off before the softmax, as in the trainer
            self.llm.apply_model(lambda m: setattr(m.logits_processor, "org_vocab_size", vocab))
        # The engine core itself, without the layer around it: a third of a multi-turn rollout's time went into wrapping and
        # unwrapping each token of each request there.
        self.core, self.request = self.llm.llm_engine.engine_core, EngineCoreRequest
        self.gpu, self.temperature, self.seed, self.max_model_len = gpu, temperature, seed, max_model_len
        self.added, self.running, self.hashed, self.waiting, self.since = 0, {}, {}, [], 0
        self.hold = HOLD if gpu else 1
        self.core.engine_core.request_block_hasher = functools.partial(self._hash_blocks, self.core.engine_core.request_block_hasher)
        self.params = functools.partial(SamplingParams, top_p=1.0, top_k=0, logprobs=0, detokenize=False, stop_token_ids=list(stop))

    def add(self, request_id, ids, max_tokens):
        ids = list(ids)     # a caller who goes on with his list would change what is kept of it
        if not 0 < len(ids) < self.max_model_len:       # the core itself would never answer, or die
            raise ValueError(f"a prompt of {len(ids)} tokens, but the engine was started for 1 to {self.max_model_len - 1}")
        self.waiting.append((request_id, ids, max_tokens))

    def _submit(self, request_id, ids, max_tokens):
        # On the GPU a seed per request would cost time and still not make a run bit-exact.
        seed = request_seed(self.seed, request_id, len(ids)) if self.temperature and not self.gpu else None
        self.added += 1     # vLLM wants each name once
        name, core = f"{request_id}/{self.added}", self.core.engine_core
        request, wave = core.preprocess_add_request(self.request(
            request_id=name, prompt_token_ids=ids, sampling_params=self.params(temperature=self.temperature, max_tokens=max_tokens, seed=seed),
            mm_features=None, pooling_params=None, arrival_time=time.time(), lora_request=None, cache_salt=None, data_parallel_rank=None))
        core.add_request(request, wave)
        self.running[name] = request_id, [], []
        self.hashed[request_id] = self.hashed[None] = ids, list(request.block_hashes)

    def _hash_blocks(self, whole, request):
        """vLLM's `whole` hasher, which names the blocks of a prompt one after the other, without those that an earlier prompt has:
        of this trajectory, or of the request before it (its group). A tenth of a multi-turn rollout went into them."""
        if not request.block_hashes:
            ids = request.prompt_token_ids
            for known, hashes in filter(None, (self.hashed.get(int(request.request_id.split("/")[0])), self.hashed.get(None))):
                if ids[: len(known)] == known:
                    request.block_hashes.extend(hashes)
                    break
        return whole(request)

    def step(self):
        self.since += 1
        if self.waiting and (self.since >= self.hold or not self.running):
            for request in self.waiting:
                self._submit(*request)
            self.waiting, self.since = [], 0
        finished = []
        for output in self.core.get_output().outputs:
            request_id, ids, logp = self.running[output.request_id]
            ids += output.new_token_ids
            if output.new_logprobs:
                logp += output.new_logprobs.logprobs[:, 0].tolist()     # a position's first entry is the sampled token
            if output.finish_reason is not None:
                reason = str(output.finish_reason)
                finished.append((request_id, ids, logp, reason if reason in ("stop", "length") else "error"))
                del self.running[output.request_id]
        return finished

    def load_weights(self, named):
        self.hashed.clear()
        self.llm.apply_model(lambda m: m.load_weights((n, p.detach()) for n, p in named))   # one by one: they may be gathered as they come
        if not self.llm.reset_prefix_cache():   # it refuses while requests run; old keys would then be reused (vllm#9744)
            raise RuntimeError("vLLM did not drop its prefix cache after the weight push")

    def checksum(self):
        return self.llm.apply_model(lambda m: weight_sums(m.parameters()))[0]

    def sleep(self):
        """Level 1: weights to the host, keys and values dropped. Only while no request runs: vLLM would abort it."""
        self.llm.sleep(level=1)

    def wake(self):
        self.llm.wake_up()
        self.llm.reset_prefix_cache()

    def abort(self):
        """After a failure: awake, and without a request. What it has cached of them goes with the next push."""
        self.waiting = []
        self.core.abort_requests(list(self.running))
        self.running.clear()
        if self.core.is_sleeping():
            self.wake()

    def close(self):
        from vllm.distributed import cleanup_dist_env_and_memory
        self.core.shutdown()
        del self.core, self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


def make_engine(kind, model, tokenizer, **settings):
    """`kind` is vllm, hf, or auto: vLLM where it is installed. Returns the engine; ValueError if the kind does not exist."""
    stop = chat_glue(tokenizer).stop
    if kind == "auto":
        kind = "vllm" if importlib.util.find_spec("vllm") else "hf"
    if kind == "vllm":
        return VLLMEngine(model, stop, vocab=len(tokenizer), **settings)
    if kind == "hf":
        return HFEngine(model, stop, vocab=len(tokenizer), **{k: v for k, v in settings.items() if k in ("temperature", "seed")})
    raise ValueError(f"engine is vllm, hf or auto, not {kind!r}")


# --- the loop ---------------------------------------------------------------------------------------------------------

def rollout(engine, tokenizer, envs, *, groups=None, names=None, max_generations=30, max_prompt=8192, max_response=8192, max_action=2048,
            max_observation=1024, think=False, faults=(), on_finish=None, stats=None, desc=None):
    """Play every env to its end with `engine`; each trajectory moves on alone, there is no turn barrier.

    Returns one Trajectory per env, in order. `groups[i]` is copied into it; `names[i]` (default i) is what the engine calls it and
    makes its seeds of. Caps are in tokens: `max_action` per message,
    `max_observation` per answer of the environment, `max_response` for everything after the prompt. A failure that is not
    the model's (a bug in an environment, an engine error) ends that trajectory with `infra_error`, reward None; three of
    the same kind in a row raise RuntimeError. `faults` of the released code, for measuring: "end_token" adds and trains an
    end token that nobody sampled after a message cut by length, which then counts as complete; "hint_context" see prompt_ids. `on_finish(i, trajectory)`
    is called as each one ends; `stats` (a dict) gets seconds and counts; `desc` shows a bar."""
    glue, spent, failures = chat_glue(tokenizer, think), collections.Counter(), []
    names = range(len(envs)) if names is None else names
    place = {name: i for i, name in enumerate(names)}
    trajectories = [Trajectory(env.task.id, groups[i] if groups else 0) for i, env in enumerate(envs)]
    bar = tqdm(total=len(envs), desc=desc, disable=desc is None, leave=False, dynamic_ncols=True)

    def end(i, finish, infra_error=None):
        t = trajectories[i]
        close_trajectory(t, envs[i], finish, infra_error, spent)
        spent["ended"] += 1
        failures.append(t.infra_error.strip().splitlines()[-1]) if t.infra_error else failures.clear()
        if len(failures) >= 3 and len(set(failures[-3:])) == 1:
            raise RuntimeError(f"three episodes in a row were lost to the same failure, which is not the model's:\n{t.infra_error}")
        bar.update()
        if on_finish:
            on_finish(i, t)

    def move(i, step, *args):
        """Let environment i move (`step` is its reset or step), take in what it says, ask for the next message."""
        t, start = trajectories[i], time.perf_counter()
        try:
            messages = step(*args)
            spent["env_s"] += time.perf_counter() - start
            if messages and t.ids:
                t.extend(observation_ids(glue, messages, max_observation))
            elif messages:
                t.extend(prompt_ids(glue, messages, special="hint_context" in faults))
                t.prompt_len = len(t.ids)
        except Exception:
            return end(i, "infra", traceback.format_exc())
        if messages is None:
            return end(i, envs[i].finish)
        room = max_response - (len(t.ids) - t.prompt_len)
        if t.prompt_len > max_prompt or len(t.texts) >= max_generations or room <= 0:
            return end(i, "prompt" if t.prompt_len > max_prompt else "max_generations" if room > 0 else "max_response")
        t.turns.append(len(envs[i].calls_per_turn) - 1)
        engine.add(names[i], list(t.ids), min(max_action, room))

    for i, env in enumerate(envs):
        move(i, env.reset)
    while spent["ended"] < len(envs):
        start = time.perf_counter()
        finished = engine.step()
        spent["engine_s"] += time.perf_counter() - start
        for name, ids, logp, reason in finished:
            i = place[name]
            t = trajectories[i]
            if reason == "error":
                end(i, "infra", "engine error: the engine gave up on this request")
                continue
            t.extend(list(ids), logp)
            if reason == "length":
                t.cut.append(len(t.texts))
                if "end_token" in faults:       # nor does the released environment ask why a message ended
                    t.extend([glue.end], [0.0])
                    reason = "stop"
            t.texts.append(tokenizer.decode(ids, skip_special_tokens=False))
            spent.update(generations=1, sampled_tokens=len(ids))
            move(i, envs[i].step, t.texts[-1], reason)
        bar.set_postfix(messages=spent["generations"], tokens=spent["sampled_tokens"], refresh=False)
    bar.close()
    if stats is not None:
        stats.update({k: v for k, v in spent.items() if k != "ended"})
    return trajectories


def close_trajectory(t, env, finish, infra_error, spent):
    """Fill in what is known at the end of an episode, its reward included; an exception in scoring is no task failure."""
    t.finish, t.infra_error = finish, infra_error
    t.source = "hint" if getattr(env, "hint", "") else "policy"
    t.calls, t.refused, t.feedback = env.calls_per_turn, len(env.refused), dict(getattr(env, "feedback_count", {}))
    if not infra_error:
        start = time.perf_counter()
        t.reward = rw.score(env.task, env.calls_per_turn)
        spent["reward_s"] += time.perf_counter() - start
        if t.reward.error not in (None, "turns"):
            t.finish, t.infra_error, t.reward = "infra", f"reward: {t.reward.error}", None
    env.close()


def trajectory_record(t, task, prompt=True):
    """A Trajectory as a JSON object. `ids`, `mask` and `logp` start after the prompt; the prompt's ids, thousands of them and
    the same for a whole group, are in "prompt_ids" if `prompt`."""
    record = {k: v for k, v in dataclasses.asdict(t).items() if k not in ("reward", "calls")}
    record |= {"ids": t.ids[t.prompt_len:], "mask": t.mask[t.prompt_len:], "logp": [round(x, 6) for x in t.logp[t.prompt_len:]]}
    return record | {"category": task.category, "index": task.index, "reward": t.reward and dataclasses.asdict(t.reward),
                     "calls": [[dataclasses.asdict(c) for c in turn] for turn in t.calls],
                     "prompt_ids": t.ids[: t.prompt_len] if prompt else None}


def save_trajectories(path, trajectories, tasks):
    """One JSON line each; `tasks[i]` is the task of trajectories[i]. A group's prompt is written once."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        for k, (t, task) in enumerate(zip(trajectories, tasks)):
            same = k and trajectories[k - 1].ids[: trajectories[k - 1].prompt_len] == t.ids[: t.prompt_len]
            f.write(json.dumps(trajectory_record(t, task, prompt=not same)) + "\n")


def load_trajectories(path):
    """The trajectories of save_trajectories, ready for grpo.update: the update can be studied without an engine."""
    trajectories, prompt = [], []
    for number, line in enumerate(open(path, encoding="utf-8"), 1):
        try:
            r = json.loads(line)
            prompt = r["prompt_ids"] if r["prompt_ids"] is not None else prompt
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{path}, line {number} is no trajectory: {type(e).__name__}: {e}") from None
        t = Trajectory(**{f.name: r[f.name] for f in dataclasses.fields(Trajectory) if f.name in r})
        t.ids, t.mask, t.logp = prompt + t.ids, [0] * len(prompt) + t.mask, [0.0] * len(prompt) + t.logp
        t.reward = rw.Reward(**r["reward"]) if r["reward"] else None
        t.calls = [[env_bfcl.Call(**c) for c in turn] for turn in r["calls"]]
        trajectories.append(t)
    return trajectories


# --- evaluation -------------------------------------------------------------------------------------------------------

def evaluate(engine, tokenizer, tasks, path=None, *, samples=1, temperature=0.0, seed=0, **settings):
    """Episodes over `tasks` with the paper's evaluation caps, greedy unless told otherwise; returns records (trajectory_record
    and "sample"), `samples` of each task.

    `path`: a jsonl file; finished episodes are appended as they end and are not played again, so a killed evaluation
    goes on where it was. The engine's temperature is put back afterwards."""
    done = {}
    if path and os.path.exists(path):
        with open(path, "rb+") as f:    # without the line that was being written when the program was killed
            f.truncate(f.read().rfind(b"\n") + 1)
        with open(path, encoding="utf-8") as f:
            done = {(r["task_id"], r["sample"]): r for r in map(json.loads, f) if not r["infra_error"]}     # those are played again
    # Tasks with the same tools one after the other: their system prompt is then read once.
    pairs = sorted(((t, k) for t in tasks for k in range(samples)), key=lambda pair: env_bfcl.system_prompt(pair[0]))
    names = [i for i, (t, k) in enumerate(pairs) if (t.id, k) not in done]      # a resumed evaluation samples with the seeds it would have had
    todo = [pairs[i] for i in names]
    if len(todo) < len(pairs):
        tqdm.write(f"{len(pairs) - len(todo)} of {len(pairs)} episodes taken from {path}")
    out = open(path, "a", encoding="utf-8") if path else None

    def keep(i, t):
        task, k = todo[i]
        done[task.id, k] = trajectory_record(t, task) | {"sample": k}
        if out:
            out.write(json.dumps(done[task.id, k]) + "\n")
            out.flush()

    before, engine.temperature, engine.seed = getattr(engine, "temperature", None), temperature, seed
    settings = {"max_response": 16384, "max_observation": 4096, "desc": "evaluate"} | settings
    feedback = settings.pop("decode_feedback", "none")
    try:
        rollout(engine, tokenizer, [BFCLEnv(t, decode_feedback=feedback) for t, _ in todo], names=names, on_finish=keep, **settings)
    finally:
        engine.temperature = before
        if out:
            out.close()
    return [done[t.id, k] for t in tasks for k in range(samples)]


def write_upstream_results(records, folder):
    """The records as bfcl-eval's own result files (one call per step, its Qwen wording), so that its checker scores them."""
    for category in sorted({r["category"] for r in records}):
        path = os.path.join(folder, f"BFCL_v4_multi_turn_{category}_result.json")
        with open(path, "w", encoding="utf-8") as f:
            for r in sorted((r for r in records if r["category"] == category), key=lambda r: r["index"]):
                steps = [[env_bfcl.render_call(env_bfcl.Call(**c)) for c in turn] for turn in r["calls"]]
                f.write(json.dumps({"id": r["task_id"], "result": steps}) + "\n")


@dataclass
class EvalConfig:
    model: str = field(metadata={"help": "a Hugging Face directory, a .gguf file or a hub id"})
    split: str = field(default="test", metadata={"help": "train, test or all"})
    categories: str = field(default="base,miss_func,miss_param,long_context", metadata={"help": "comma-separated"})
    out: str = field(default="", metadata={"help": "folder of the results; default runs/eval/<the last two parts of the model's path>"})
    limit: int = field(default=0, metadata={"help": "only the first N tasks of each category"})
    engine: str = field(default="auto", metadata={"help": "vllm, hf or auto"})
    short_docs: bool = field(default=False, metadata={"help": "tool docs without their 'response' part"})
    decode_feedback: str = field(default="none", metadata={"help": "answer to an undecodable call: none, short or error"})
    think: bool = field(default=False, metadata={"help": "let a hybrid model think (Qwen3)"})
    max_action: int = field(default=2048, metadata={"help": "tokens per message"})
    kv_gib: float = field(default=16.0, metadata={"help": "GiB of keys and values in vLLM"})
    show: int = field(default=0, metadata={"help": "print the first N trajectories with their sampled tokens marked"})


def main():
    config = parse_flags(EvalConfig, description=__doc__.split("\n")[0])
    try:
        check_numbers(config, "max_action kv_gib")
        if config.engine not in ("auto", "vllm", "hf"):
            raise ValueError(f"--engine is vllm, hf or auto, not {config.engine!r}")
        if config.decode_feedback not in ("none", "short", "error"):
            raise ValueError(f"--decode_feedback is none, short or error, not {config.decode_feedback!r}")
        tasks = env_bfcl.load_tasks(config.split, tuple(config.categories.split(",")), short_docs=config.short_docs)
        path = find_model(config.model)
        tokenizer = load_tokenizer(path)
        if config.limit:
            tasks = [t for c in dict.fromkeys(config.categories.split(",")) for t in [t for t in tasks if t.category == c][: config.limit]]
        out = config.out or os.path.join("runs", "eval", re.sub(r"[^\w.]+", "-", "-".join(os.path.normpath(config.model).split(os.sep)[-2:])).strip("-."))
        os.makedirs(out, exist_ok=True)
        # An evaluation is continued only with the flags and the weights that started it.
        flags, flags_path = dataclasses.asdict(config) | {"show": 0, "limit": 0, "kv_gib": 0, "files": weight_files(path)}, os.path.join(out, "config.json")
        if os.path.exists(flags_path) and json.load(open(flags_path)) != flags:
            raise ValueError(f"{out} holds an evaluation with other flags or other weights: give another --out")
        engine = make_engine(config.engine, path, tokenizer, kv_gib=config.kv_gib, max_model_len=8192 + 16384)
        with open(flags_path, "w") as f:        # last: flags that do not work are no evaluation
            json.dump(flags, f, indent=1)
    except (ValueError, OSError) as e:
        sys.exit(f"error: {e}")
    records = evaluate(engine, tokenizer, tasks, os.path.join(out, "episodes.jsonl"), think=config.think,
                       decode_feedback=config.decode_feedback, max_action=config.max_action)
    for t in load_trajectories(os.path.join(out, "episodes.jsonl"))[: config.show]:
        print_trajectory(t, tokenizer)
    write_upstream_results(records, out)
    table = summary(records)
    json.dump(table, open(os.path.join(out, "summary.json"), "w"), indent=1)
    print(format_table(table))
    print("finish:", dict(collections.Counter(r["finish"] for r in records)), f"\nwritten to {out}/")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: the same command goes on where it was")
