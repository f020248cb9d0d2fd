//! `rapt explain`: the plan of a problem that is described, not held; or the table of what is served.

use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args as ClapArgs, ValueEnum};
use rapt::{DType, Device, Engine, Error, Extent, Plan, Result, Shape, Spec, Strides, View};
use serde_json::json;

use crate::options::{LayoutName, ProblemArgs};
use crate::{Outcome, support, table};

#[derive(ClapArgs, Debug)]
pub(crate) struct Args {
    /// batch, query heads, q_len, kv_len, head_dim.
    #[arg(long, value_name = "B,H,Sq,Skv,D", value_parser = shape, required_unless_present = "support_table")]
    shape: Option<[usize; 5]>,
    /// Heads of k and v [default: as many as of q].
    #[arg(long, value_name = "N")]
    kv_heads: Option<usize>,
    /// The size of a value [default: head_dim].
    #[arg(long, value_name = "N")]
    head_dim_v: Option<usize>,
    /// The dtype of q, k and v.
    #[arg(long, default_value = "float32", value_parser = dtype)]
    dtype: DType,
    /// A mask of shape [batch, heads, q_len, kv_len].
    #[arg(long, value_enum, default_value = "none")]
    mask: MaskName,
    #[command(flatten)]
    problem: ProblemArgs,
    /// The plan as JSON.
    #[arg(long, conflicts_with = "support_table")]
    json: bool,
    /// What each instruction set of this build serves, as Markdown; asks `select` for every cell.
    #[arg(long, conflicts_with = "shape")]
    support_table: bool,
}

/// The mask of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MaskName {
    /// No mask.
    None,
    /// True = attend.
    Bool,
    /// Added to the scores, in the accumulation dtype.
    Additive,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let Some(shape) = args.shape else {
        print!("{}", support::markdown());
        return Ok(ExitCode::SUCCESS);
    };
    let plan = plan(args, shape)?;
    if args.json {
        println!("{:#}", as_json(&plan));
    } else {
        println!("{}", table::framed(&plan.explain().rows()));
    }
    Ok(ExitCode::SUCCESS)
}

/// The plan for row-major tensors of these sizes.
fn plan(args: &Args, [batch, heads, q_len, kv_len, head_dim]: [usize; 5]) -> Result<Arc<Plan>> {
    let kv_heads = args.kv_heads.unwrap_or(heads);
    let head_dim_v = args.head_dim_v.unwrap_or(head_dim);
    let of = |heads, len, dim| match args.problem.layout {
        LayoutName::Bhsd => Shape::from([batch, heads, len, dim]),
        LayoutName::Bshd => Shape::from([batch, len, heads, dim]),
    };
    let q = unread("q", args.dtype, of(heads, q_len, head_dim))?;
    let k = unread("k", args.dtype, of(kv_heads, kv_len, head_dim))?;
    let v = unread("v", args.dtype, of(kv_heads, kv_len, head_dim_v))?;
    let mask_dtype = match args.mask {
        MaskName::None => None,
        MaskName::Bool => Some(DType::Bool),
        MaskName::Additive => Some(args.dtype.accumulation()),
    };
    let mask = mask_dtype.map(|dtype| unread("mask", dtype, [batch, heads, q_len, kv_len].into())).transpose()?;
    let spec = Spec::builder(&q, &k, &v, &args.problem.options()).mask(mask.as_ref()).build()?;
    Engine::new(args.problem.threads)?.plan(&spec)
}

/// A row-major view of memory that does not exist, for a spec alone.
fn unread(tensor: &'static str, dtype: DType, shape: Shape) -> Result<View<'static>> {
    let strides = shape.contiguous().ok_or(Error::Overflow { tensor, shape, strides: Strides::from([]) })?;
    let address = std::ptr::without_provenance(64);
    // SAFETY: no element is ever read: `plan` gives these views to `Spec::builder`, which looks at dtype, shape and
    // strides, and lets them go.
    unsafe { View::from_raw_parts(tensor, address, dtype, shape, strides, Device::Cpu, Extent::Declared) }
}

fn as_json(plan: &Plan) -> serde_json::Value {
    let words: serde_json::Map<String, serde_json::Value> =
        plan.explain().rows().into_iter().map(|(name, text)| (name.to_owned(), text.into())).collect();
    json!({
        "kernel": plan.key.kernel.name(),
        "isa": plan.key.arch.name(),
        "storage": plan.key.storage.name(),
        "accumulation": plan.key.accumulation.name(),
        "block_m": plan.block_m,
        "block_n": plan.block_n,
        "num_splits": plan.num_splits,
        "items": plan.items,
        "threads": plan.threads,
        "workspace_bytes": plan.workspace_bytes,
        "kv_in_place": plan.kv_in_place,
        "flops": plan.cost.flops,
        "bytes_read": plan.cost.bytes_read,
        "bytes_written": plan.cost.bytes_written,
        "bytes_copied": plan.cost.bytes_copied,
        "bytes_packed": plan.cost.bytes_packed,
        "floor_cycles": plan.cost.floor_cycles,
        "floor_seconds": plan.cost.floor_seconds,
        "words": words,
    })
}

/// `B,H,Sq,Skv,D`.
pub(crate) fn shape(text: &str) -> Result<[usize; 5], String> {
    let sizes: Vec<usize> = text
        .split(',')
        .map(|size| size.trim().parse().map_err(|_| format!("{size:?} is no size")))
        .collect::<Result<_, _>>()?;
    sizes.try_into().map_err(|sizes: Vec<usize>| format!("5 sizes are asked, B,H,Sq,Skv,D; got {}", sizes.len()))
}

/// A dtype by its usual name, or as Rust writes those that attention computes.
pub(crate) fn dtype(text: &str) -> Result<DType, String> {
    let short = [("f64", DType::F64), ("f32", DType::F32), ("f16", DType::F16), ("bf16", DType::BF16)];
    let known = || short.iter().find(|(name, _)| *name == text).map(|(_, dtype)| *dtype);
    DType::from_name(text).or_else(known).ok_or_else(|| {
        let names: Vec<&str> = DType::ALL.iter().map(|dtype| dtype.name()).collect();
        format!("the known dtypes are {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_dtypes_are_read() {
        assert_eq!(shape("1,2, 3,4,5"), Ok([1, 2, 3, 4, 5]));
        assert!(shape("1,2,3").unwrap_err().contains("got 3"));
        assert!(shape("1,2,3,4,-5").is_err());
        assert_eq!(dtype("bf16"), Ok(DType::BF16));
        assert_eq!(dtype("bfloat16"), Ok(DType::BF16));
        assert_eq!(dtype("int8"), Ok(DType::I8), "recognised here, refused by the spec");
        assert!(dtype("float").unwrap_err().contains("float32"));
    }
}
