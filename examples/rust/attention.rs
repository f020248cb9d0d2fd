//! Grouped heads, a mask and the log-sum-exp, on a `[batch, len, heads, head_dim]` buffer that is read in place.
//!
//! ```text
//! cargo run -p rapt-attention --example attention
//! ```

use rapt::{DType, Engine, Error, Operands, Options, Tensor, TensorLayout, Tensors, View};

const BATCH: usize = 2;
const LEN: usize = 6;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 8;

/// Numbers that differ, without a library of random ones.
fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|at| ((at * 37 % 101) as f32 - 50.0) / 50.0).collect()
}

fn main() -> Result<(), Error> {
    let (q, k, v) = (
        numbers(BATCH * LEN * HEADS * HEAD_DIM),
        numbers(BATCH * LEN * KV_HEADS * HEAD_DIM),
        numbers(BATCH * LEN * KV_HEADS * HEAD_DIM),
    );
    // The second sequence has two keys of padding.
    let keep: Vec<bool> = (0..BATCH * LEN).map(|at| at % LEN < LEN - 2 * (at / LEN)).collect();

    let mut out = Tensor::zeros(DType::F32, [BATCH, LEN, HEADS, HEAD_DIM].into())?;
    let mut lse = Tensor::zeros(DType::F32, [BATCH, HEADS, LEN].into())?;
    let tensors = Tensors {
        mask: Some(View::contiguous("mask", &keep, [BATCH, 1, 1, LEN].into())?),
        lse: Some(lse.view_mut()?),
        ..Tensors::new(
            View::contiguous("q", &q, [BATCH, LEN, HEADS, HEAD_DIM].into())?,
            View::contiguous("k", &k, [BATCH, LEN, KV_HEADS, HEAD_DIM].into())?,
            View::contiguous("v", &v, [BATCH, LEN, KV_HEADS, HEAD_DIM].into())?,
            out.view_mut()?,
        )
    };

    // The request without its pointers, what will run for it, and the proof that the tensors fit.
    let engine = Engine::new(None)?;
    let spec = rapt::spec_of(&tensors, &Options::default().with_layout(TensorLayout::Bshd))?;
    let plan = engine.plan(&spec)?;
    println!("{}", plan.explain());
    engine.run(&plan, &mut Operands::check(tensors, plan.spec())?)?;

    let sums = lse.to_vec::<f32>()?;
    println!("lse of the first row: {}", sums[0]);
    assert!(sums.iter().all(|sum| sum.is_finite()));
    assert!(out.to_vec::<f32>()?.iter().all(|number| number.abs() <= 1.0), "means of values within ±1");
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_example_runs() {
        super::main().unwrap();
    }
}
