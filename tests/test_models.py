"""Real architectures, tiny and with random weights: the replay of one training step is bit-exact."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from steps import Case
from test_replay import check

pytestmark = pytest.mark.models
transformers = pytest.importorskip("transformers")

TEXT = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def tokens(name: str = "input_ids") -> dict[str, torch.Tensor]:
    """Return two token sequences."""
    return {name: torch.randint(3, 60, (2, 9))}


def language(model: str, config: str, **options: Any) -> Callable[[], Case]:
    """Return a builder of a language model that predicts its own input."""

    def build() -> Case:
        network = getattr(transformers, model)(getattr(transformers, config)(**options)).train()
        batch = tokens()
        mask = torch.ones_like(batch["input_ids"])
        mask[1, 6:] = 0
        return network, {**batch, "attention_mask": mask, "labels": batch["input_ids"]}, lambda m, b: m(**b).loss

    return build


def encoder(model: str, config: str, shape: tuple[int, ...], **options: Any) -> Callable[[], Case]:
    """Return a builder of an encoder whose mean square output is the loss."""

    def build() -> Case:
        network = getattr(transformers, model)(getattr(transformers, config)(**options)).train()
        return network, torch.randn(*shape), lambda m, b: m(b).last_hidden_state.square().mean()

    return build


def checkpointed(build: Callable[[], Case]) -> Callable[[], Case]:
    """Return a builder of the same model with activation checkpointing."""

    def builder() -> Case:
        model, batch, step = build()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model, batch, step

    return builder


def clip() -> Case:
    """Build CLIP with its contrastive loss."""
    text = {**TEXT, "intermediate_size": 32, "max_position_embeddings": 12, "eos_token_id": 2}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    batch = {**tokens(), "pixel_values": torch.randn(2, 3, 16, 16)}
    return transformers.CLIPModel(config).train(), batch, lambda m, b: m(**b, return_loss=True).loss


BERT = language("BertForMaskedLM", "BertConfig", **TEXT, intermediate_size=32, max_position_embeddings=16)
GPT2 = language("GPT2LMHeadModel", "GPT2Config", vocab_size=60, n_positions=16, n_embd=16, n_layer=2, n_head=2)
T5 = language(
    "T5ForConditionalGeneration",
    "T5Config",
    vocab_size=60,
    d_model=16,
    d_kv=8,
    d_ff=32,
    num_layers=2,
    num_heads=2,
    decoder_start_token_id=0,
)
LLAMA = language(
    "LlamaForCausalLM", "LlamaConfig", **TEXT, intermediate_size=32, num_key_value_heads=1, attention_dropout=0.1
)
MIXTRAL = language(
    "MixtralForCausalLM",
    "MixtralConfig",
    **TEXT,
    intermediate_size=32,
    num_key_value_heads=1,
    num_local_experts=4,
    num_experts_per_tok=2,
    attention_dropout=0.1,
    output_router_logits=True,
)
MAMBA = language("MambaForCausalLM", "MambaConfig", vocab_size=60, hidden_size=16, state_size=4, num_hidden_layers=2)
DEBERTA = language(
    "DebertaV2ForMaskedLM",
    "DebertaV2Config",
    **TEXT,
    intermediate_size=32,
    max_position_embeddings=16,
    relative_attention=True,
    pos_att_type=["p2c", "c2p"],
    type_vocab_size=0,
)
VIT = encoder(
    "ViTModel",
    "ViTConfig",
    (2, 3, 16, 16),
    image_size=16,
    patch_size=8,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1,
)
WAV2VEC2 = encoder(
    "Wav2Vec2Model",
    "Wav2Vec2Config",
    (2, 800),
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    conv_dim=(8, 8),
    conv_kernel=(10, 3),
    conv_stride=(5, 2),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    mask_time_prob=0.3,
    mask_time_length=2,
    mask_time_min_masks=2,
    layerdrop=0.1,
)
MODELS = {
    "bert": BERT,
    "bert_checkpointed": checkpointed(BERT),
    "gpt2": GPT2,
    "llama": LLAMA,
    "t5": T5,
    "t5_checkpointed": checkpointed(T5),
    "mamba": MAMBA,
    "mixtral": MIXTRAL,
    "deberta": DEBERTA,
    "vit": VIT,
    "wav2vec2": WAV2VEC2,
    "clip": clip,
}


@pytest.mark.parametrize("name", MODELS)
def test_replay_of_a_model_is_bit_exact(name: str) -> None:
    """Loss and every gradient of the replay are those of an eager training step, with dropout on."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers and its imports deprecate is not ours
        recording = check(MODELS[name]())
    sources = {node.source.file for node in recording.program.nodes if node.source is not None}
    assert all("torch" not in source.split("/") for source in sources)
