"""A tiny model to train on a CPU: Qwen3's architecture at random init and a byte-level BPE tokenizer, made in seconds.

Nobody imports this; run.sh calls it where there is no GPU. Same seed, same bytes. What it shares with Qwen's models: NFC,
the pre-tokenizer (digits one by one), the chat format, the special tokens and tag tokens. What it does not:
 1. The vocabulary has 4,096 entries instead of 151,936: with Qwen's, a model of this size is 18-29 times slower on a CPU.
    The merges come from texts of the train tasks only, so the held-out tasks cost it some tokens more.
 2. The embedding has exactly as many rows as the tokenizer has tokens. Qwen's has rows that no token uses; an engine can
    sample them, a tokenizer cannot decode them.
 3. The template knows the roles system, user and assistant, adds no system text of its own and no think block: what
    Qwen2.5 does with messages that start with a system message.

    python tools/tiny_model.py runs/tiny_model                              # 1.3 M parameters
    python tools/tiny_model.py runs/small_model --hidden 256                # 4.2 M
"""
import argparse
import os
import sys

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from env_bfcl import BFCLEnv, load_tasks, render_call, system_prompt

transformers.utils.logging.disable_progress_bar()   # it would show one shard

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]       # skipped by decode(skip_special_tokens=True)
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]    # not skipped, as Qwen's
QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('this template takes the roles system, user and assistant, not ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_texts():
    """Every text a train episode shows or asks for: system prompts once each, user turns, calls, tool results."""
    texts = []
    for task in load_tasks("train"):
        env = BFCLEnv(task)
        texts += [message["content"] for message in env.reset()] + [system_prompt(task)]
        for calls in task.ground_truth:
            action = "\n".join(map(render_call, calls))
            for text in ([action] if calls else []) + ["Done."]:      # a message without a call ends the user turn
                texts.append(text)
                texts += [message["content"] for message in env.step(text + "<|im_end|>") or []]
        env.close()
    return list(dict.fromkeys(texts))       # the same tool docs head many tasks; each text counts once


def make_tokenizer(texts, vocab):
    """Byte-level BPE of exactly `vocab` entries, special tokens and tags last, as in Qwen's tokenizers."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    bpe.decoder = decoders.ByteLevel()
    for tag in TAGS:        # a tag is one token of its own, so its letters must not spend merges
        texts = [text.replace(tag, "\n") for text in texts]
    size = vocab - len(SPECIAL) - len(TAGS)
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    if bpe.get_vocab_size() != size:
        sys.exit(f"error: --vocab {vocab} does not fit the training text: merges run out at {bpe.get_vocab_size()} entries")
    bpe.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    bpe.add_tokens([AddedToken(t, normalized=False, special=False) for t in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False, model_max_length=32768)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="directory to write")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096, help="entries of the tokenizer = rows of the embedding")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    args = parser.parse_args()
    if args.hidden % 64 or args.hidden < 64 or args.layers < 1:
        sys.exit("error: --hidden must be a multiple of 64 and --layers at least 1")    # an even number of heads of 32
    if args.vocab < 256 + len(SPECIAL) + len(TAGS):
        sys.exit("error: --vocab must have room for the 256 bytes and the special tokens")

    texts = train_texts()
    tokenizer = make_tokenizer(texts, args.vocab)
    eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    torch.manual_seed(args.seed)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32, num_key_value_heads=args.hidden // 64, head_dim=32,
        max_position_embeddings=32768, tie_word_embeddings=True, bos_token_id=None, eos_token_id=eos[0], pad_token_id=eos[1]))
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos[1])
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)

    # Read it back the way the trainer does: a tokenizer class that rebuilds the pipeline would change ids silently.
    again, sample = AutoTokenizer.from_pretrained(args.out), texts[0] + " <tool_call> 2026 \u00e9e\u0301<|im_end|>\n"
    assert again(sample).input_ids == tokenizer(sample).input_ids and len(again) == model.config.vocab_size
    n_bytes, n_ids = sum(len(t.encode()) for t in texts), sum(map(len, tokenizer(texts).input_ids))
    print(f"{args.out}: {model.num_parameters():,} parameters, {len(tokenizer):,} tokens, {n_bytes / n_ids:.1f} bytes a token")


if __name__ == "__main__":
    main()
