"""A LLaMA of 40,000 parameters with a tokenizer of its own, made here, in a folder as `transformers` keeps them."""

from functools import cache
from pathlib import Path

TEXT = "The paper says that one bit is enough. Answer the question in a few words, please."


def write_tiny_llama(folder: Path, context: int = 256) -> None:
    """config.json, model.safetensors and the tokenizer's files in `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, utils

    utils.logging.disable_progress_bar()
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=context, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)


@cache
def _tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    # As LLaMA's: every text begins with a token of its own.
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
