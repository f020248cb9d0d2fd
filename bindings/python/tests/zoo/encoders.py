"""Encoders of text: BERT, MiniLM with pooling, ModernBERT, DistilBERT, T5, Whisper's two halves, CLIP's text model."""

import torch
import transformers

from zoo import Case, register

VOCABULARY = 64


def tokens(generator, batch, seq):
    return torch.randint(3, VOCABULARY, (batch, seq), generator=generator)


def padding(generator, batch, seq):
    """A mask of 1 and 0 whose rows end at different lengths; the first is full."""
    lengths = torch.randint(1, seq + 1, (batch,), generator=generator)
    lengths[0] = seq
    return (torch.arange(seq)[None] < lengths[:, None]).long()


def tokens_and_mask(generator, batch, seq):
    return (), {"input_ids": tokens(generator, batch, seq), "attention_mask": padding(generator, batch, seq)}


def both(dim):
    return {"input_ids": {0: dim("batch"), 1: dim("seq")}, "attention_mask": {0: dim("batch"), 1: dim("seq")}}


TEXT = {"exported": {"batch": 2, "seq": 7}, "others": ({"batch": 3, "seq": 12}, {"batch": 2, "seq": 5}), "dynamic": both}
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def bert_config():
    return transformers.BertConfig(**SMALL, intermediate_size=48, max_position_embeddings=32)


register(Case("bert", lambda: transformers.BertModel(bert_config()), tokens_and_mask, **TEXT))


class SentenceEncoder(torch.nn.Module):
    """all-MiniLM-L6-v2's shape: BERT, the mean over real tokens, length 1."""

    def __init__(self):
        super().__init__()
        self.bert = transformers.BertModel(bert_config(), add_pooling_layer=False)

    def forward(self, input_ids, attention_mask):
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).expand_as(hidden).to(hidden.dtype)
        mean = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, p=2, dim=1)


register(Case("minilm_pool", SentenceEncoder, tokens_and_mask, **TEXT))


def modernbert():
    config = transformers.ModernBertConfig(
        **SMALL,
        intermediate_size=48,
        max_position_embeddings=64,
        global_attn_every_n_layers=2,
        local_attention=6,
        pad_token_id=0,
        cls_token_id=1,
        sep_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="sdpa",
    )
    return transformers.ModernBertModel(config)


register(Case("modernbert", modernbert, tokens_and_mask, **TEXT))


def distilbert():
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=32, hidden_dim=48, n_layers=2, n_heads=4, max_position_embeddings=32, num_labels=3
    )
    return transformers.DistilBertForSequenceClassification(config)


register(Case("distilbert_cls", distilbert, tokens_and_mask, **TEXT))


class T5(torch.nn.Module):
    """Encoder and decoder, without a cache."""

    def __init__(self):
        super().__init__()
        config = transformers.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
        self.model = transformers.T5ForConditionalGeneration(config)

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "decoder_input_ids": decoder_input_ids}
        return self.model(**given, use_cache=False).logits


def t5_inputs(generator, batch, seq, target):
    _, given = tokens_and_mask(generator, batch, seq)
    return (), {**given, "decoder_input_ids": tokens(generator, batch, target)}


register(
    Case(
        "t5",
        T5,
        t5_inputs,
        {"batch": 2, "seq": 9, "target": 5},
        ({"batch": 3, "seq": 40, "target": 7},),
        lambda dim: {**both(dim), "decoder_input_ids": {0: dim("batch"), 1: dim("target")}},
    )
)


def clip_text():
    config = transformers.CLIPTextConfig(
        **SMALL, intermediate_size=48, max_position_embeddings=16, eos_token_id=2, bos_token_id=1, projection_dim=16
    )
    return transformers.CLIPTextModelWithProjection(config)


register(
    Case(
        "clip_text", clip_text, tokens_and_mask, {"batch": 2, "seq": 7}, ({"batch": 3, "seq": 12}, {"batch": 2, "seq": 5}), both
    )
)


def whisper_config():
    return transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=24,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


class WhisperEncoder(torch.nn.Module):
    """Two convolutions over mel frames, then attention."""

    def __init__(self):
        super().__init__()
        self.encoder = transformers.WhisperModel(whisper_config()).encoder

    def forward(self, input_features):
        return self.encoder(input_features).last_hidden_state


register(
    Case(
        "whisper_enc",
        WhisperEncoder,
        lambda generator, batch: ((torch.randn(batch, 8, 40, generator=generator),), {}),
        {"batch": 2},
        ({"batch": 3},),
        lambda dim: ({0: dim("batch")},),
    )
)


class WhisperDecoder(torch.nn.Module):
    """Attention over what was said before, and over the encoder's result."""

    def __init__(self):
        super().__init__()
        model = transformers.WhisperForConditionalGeneration(whisper_config())
        self.decoder, self.head = model.model.decoder, model.proj_out

    def forward(self, decoder_input_ids, encoder_hidden_states):
        out = self.decoder(input_ids=decoder_input_ids, encoder_hidden_states=encoder_hidden_states, use_cache=False)
        return self.head(out.last_hidden_state)


register(
    Case(
        "whisper_dec",
        WhisperDecoder,
        lambda generator, batch, target: (
            (tokens(generator, batch, target), torch.randn(batch, 20, 32, generator=generator)),
            {},
        ),
        {"batch": 2, "target": 5},
        ({"batch": 3, "target": 9},),
        lambda dim: ({0: dim("batch"), 1: dim("target")}, {0: dim("batch")}),
    )
)
