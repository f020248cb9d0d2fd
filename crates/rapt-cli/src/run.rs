//! `rapt run`: attention on .npy files.

use std::path::PathBuf;

use clap::Args as ClapArgs;
use rapt::{Engine, Operands, Shape, Spec, Tensor, Tensors};

use crate::npy::{self, Array};
use crate::options::ProblemArgs;
use crate::{Outcome, exit, say};

#[derive(ClapArgs, Debug)]
pub(crate) struct Args {
    /// [batch, heads, q_len, head_dim], or less its leading dimensions; float64, float32 or float16.
    q: PathBuf,
    /// [batch, kv_heads, kv_len, head_dim].
    k: PathBuf,
    /// [batch, kv_heads, kv_len, head_dim_v].
    v: PathBuf,
    /// Where the result goes.
    out: PathBuf,
    /// A mask, bool (True = attend) or additive, that broadcasts to [batch, heads, q_len, kv_len].
    #[arg(long, value_name = "FILE")]
    mask: Option<PathBuf>,
    /// Where the log of the sum of exponentials goes.
    #[arg(long, value_name = "FILE")]
    lse: Option<PathBuf>,
    #[command(flatten)]
    problem: ProblemArgs,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let (q, k, v) = (Array::read(&args.q)?, Array::read(&args.k)?, Array::read(&args.v)?);
    let mask = args.mask.as_deref().map(Array::read).transpose()?;
    let (q, k, v) = (q.view("q")?, k.view("k")?, v.view("v")?);
    let mask = mask.as_ref().map(|mask| mask.view("mask")).transpose()?;
    let spec = Spec::builder(&q, &k, &v, &args.problem.options())
        .mask(mask.as_ref())
        .return_lse(args.lse.is_some())
        .build()?;
    let engine = Engine::new(args.problem.threads)?;
    let plan = engine.plan(&spec)?;

    let rank = q.shape().len();
    let mut out = Tensor::zeros(spec.out.dtype, spec.out_shape(rank))?;
    let lse_tensor = |lse: &rapt::TensorSpec<3>| {
        let shape = Shape::new(&lse.shape[4 - rank..]).expect("at most three dimensions");
        Tensor::zeros(lse.dtype, shape)
    };
    let mut lse = spec.lse.as_ref().map(lse_tensor).transpose()?;
    let tensors = Tensors {
        mask,
        lse: lse.as_mut().map(Tensor::view_mut).transpose()?,
        ..Tensors::new(q, k, v, out.view_mut()?)
    };
    engine.run(&plan, &mut Operands::check(tensors, &spec)?)?;

    npy::write(&args.out, &out)?;
    if let Some((path, lse)) = args.lse.as_ref().zip(lse) {
        npy::write(path, &lse)?;
    }
    let key = *plan.key();
    say(&format_args!(
        "{}: {} {}, {} {} on {}",
        args.out.display(),
        out.dtype(),
        out.shape(),
        key.kernel.name(),
        key.storage,
        key.arch.name()
    ))?;
    Ok(exit::OK)
}
