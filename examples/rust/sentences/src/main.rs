//! Sentences become embeddings by an exported model, and each finds the one that is most like it. No Python in the process.
//!
//! ```text
//! cargo run --release -p rapt-sentences -- MODEL.pt2 TOKENIZER.json SENTENCES.txt [REFERENCE.f64]
//! ```
//! The model takes `input_ids` and `attention_mask`, int64 `[batch, length]`, and gives embeddings of length one, float32 `[batch, dim]`:
//! `demo/export_sentences.py` writes such a one. The last file, if it is given, holds float64 numbers: the embeddings of the same model
//! computed in float64, then those that it gave in float32 where it was exported. The program fails unless its own embeddings
//! are as near to the first as the second are.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rapt::model::{Input, Model, Output};
use rapt::{Shape, View};
use tokenizers::{PaddingParams, Tokenizer, TruncationParams};

/// Sentences of a call.
const BATCH: usize = 16;
/// Tokens of a sentence, at most; what is longer is cut.
const MOST_TOKENS: usize = 256;
/// How much farther from the truth than the exporter's own numbers the embeddings may be: another order of summing alone may
/// double an error.
const MOST_ERROR: f64 = 2.0;
/// What may be missing to a cosine of 1.
const MOST_COSINE_LOST: f64 = 1e-6;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// An embedding of each sentence.
struct Embeddings {
    rows: Vec<Vec<f64>>,
    /// The time of the model alone.
    took: Duration,
}

fn tokenizer(path: &Path) -> Outcome<Tokenizer> {
    let mut tokenizer = Tokenizer::from_file(path).map_err(|error| format!("{}: {error}", path.display()))?;
    tokenizer.with_truncation(Some(TruncationParams { max_length: MOST_TOKENS, ..Default::default() }))?;
    // Each batch is as long as its longest sentence.
    tokenizer.with_padding(Some(PaddingParams::default()));
    Ok(tokenizer)
}

fn embed(model: &Model, tokenizer: &Tokenizer, sentences: &[String]) -> Outcome<Embeddings> {
    let mut all = Embeddings { rows: Vec::new(), took: Duration::ZERO };
    for batch in sentences.chunks(BATCH) {
        let encoded = tokenizer.encode_batch(batch.to_vec(), true)?;
        let len = encoded.first().map_or(0, tokenizers::Encoding::len);
        let int64s = |of: fn(&tokenizers::Encoding) -> &[u32]| -> Vec<i64> {
            encoded.iter().flat_map(of).map(|number| i64::from(*number)).collect()
        };
        let (ids, mask) = (int64s(|one| one.get_ids()), int64s(|one| one.get_attention_mask()));
        let shape = Shape::from([batch.len(), len]);
        let start = Instant::now();
        let mut inputs =
            [Input::from(View::contiguous("ids", &ids, shape)?), Input::from(View::contiguous("mask", &mask, shape)?)];
        let outputs = model.run(&mut inputs)?;
        all.took += start.elapsed();
        let [Output::Tensor(embeddings)] = outputs.as_slice() else {
            return Err(format!("the model gives {} results, not one tensor", outputs.len()).into());
        };
        let numbers = embeddings.to_vec::<f32>()?;
        let rows = numbers.chunks_exact((numbers.len() / batch.len()).max(1));
        all.rows.extend(rows.map(|row| row.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>()));
    }
    Ok(all)
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// The sentence that is most like each.
fn print(sentences: &[String], embeddings: &[Vec<f64>]) {
    for (at, (sentence, row)) in sentences.iter().zip(embeddings).enumerate() {
        let first: Vec<String> = row.iter().take(4).map(|x| format!("{x:+.4}")).collect();
        println!("[{}, …] {sentence}", first.join(", "));
        let others = embeddings.iter().enumerate().filter(|(other, _)| *other != at);
        let likeness = others.map(|(other, embedding)| (cosine(row, embedding), other));
        if let Some((cosine, other)) = likeness.max_by(|a, b| a.0.total_cmp(&b.0)) {
            println!("    {cosine:.3}  {}", sentences[other]);
        }
    }
}

/// Fails unless the embeddings are as near to the truth as the exporter's own.
fn compare(embeddings: &[Vec<f64>], path: &Path) -> Outcome<()> {
    let bytes = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let numbers: Vec<f64> = bytes.as_chunks::<8>().0.iter().map(|eight| f64::from_le_bytes(*eight)).collect();
    let dim = embeddings.first().map_or(0, Vec::len);
    if dim == 0 || numbers.len() != 2 * dim * embeddings.len() {
        return Err(
            format!("{}: {} numbers, not twice {} × {dim}", path.display(), numbers.len(), embeddings.len()).into()
        );
    }
    let (truth, stock) = numbers.split_at(numbers.len() / 2);
    let ours: Vec<f64> = embeddings.concat();
    let mean = |numbers: &[f64]| {
        numbers.iter().zip(truth).map(|(x, truth)| (x - truth).abs()).sum::<f64>() / truth.len() as f64
    };
    let lost = embeddings.iter().zip(truth.chunks_exact(dim)).map(|(row, truth)| 1.0 - cosine(row, truth));
    let (ours, stock, lost) = (mean(&ours), mean(stock), lost.fold(0.0, f64::max));
    println!(
        "mean difference from the model in float64: {ours:.2e}, where it was exported {stock:.2e}; least cosine 1 − {lost:.1e}"
    );
    // Written so that a NaN fails too.
    if !(ours <= MOST_ERROR * stock && lost <= MOST_COSINE_LOST) {
        return Err(format!("the embeddings are more than {MOST_ERROR} times as far off as the exporter's").into());
    }
    Ok(())
}

fn run(words: &[PathBuf]) -> Outcome<()> {
    let (model, tokens, text, reference) = match words {
        [model, tokens, text] => (model, tokens, text, None),
        [model, tokens, text, reference] => (model, tokens, text, Some(reference)),
        _ => return Err("rapt-sentences MODEL.pt2 TOKENIZER.json SENTENCES.txt [REFERENCE.f64]".into()),
    };
    let start = Instant::now();
    let model = Model::open(model)?;
    println!("loaded in {:.0} ms", start.elapsed().as_secs_f64() * 1e3);
    let tokenizer = tokenizer(tokens)?;
    let text = std::fs::read_to_string(text).map_err(|error| format!("{}: {error}", text.display()))?;
    let sentences: Vec<String> = text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect();
    let embeddings = embed(&model, &tokenizer, &sentences)?;
    print(&sentences, &embeddings.rows);
    let seconds = embeddings.took.as_secs_f64();
    println!("{} sentences in {seconds:.2} s: {:.0} a second", sentences.len(), sentences.len() as f64 / seconds);
    reference.map_or(Ok(()), |reference| compare(&embeddings.rows, reference))
}

fn main() -> Outcome<()> {
    run(&std::env::args_os().skip(1).map(PathBuf::from).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model of random weights, its tokenizer, sentences, and what PyTorch made of them: `demo/export_sentences.py --small` wrote it.
    fn small() -> Vec<PathBuf> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("small");
        ["model.pt2", "tokenizer.json", "sentences.txt", "reference.f64"].map(|file| folder.join(file)).to_vec()
    }

    #[test]
    fn the_example_runs_and_its_embeddings_are_those_of_the_exporter() {
        run(&small()).unwrap();
    }

    #[test]
    fn other_embeddings_are_noticed() {
        let mut words = small();
        let bytes = std::fs::read(&words[3]).unwrap();
        let altered = std::env::temp_dir().join(format!("rapt-sentences-{}.f64", std::process::id()));
        let mut numbers: Vec<f64> = bytes.as_chunks::<8>().0.iter().map(|eight| f64::from_le_bytes(*eight)).collect();
        numbers[0] += 1e-2;
        std::fs::write(&altered, numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
        words[3].clone_from(&altered);
        assert!(run(&words).is_err());
        std::fs::write(&altered, &bytes[8..]).unwrap();
        assert!(run(&words).unwrap_err().to_string().contains("numbers, not twice"));
        std::fs::remove_file(altered).unwrap();
        assert!(run(&[]).unwrap_err().to_string().contains("MODEL.pt2"));
    }
}
