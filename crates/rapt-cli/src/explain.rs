//! `rapt explain`: the plan of a problem that is described, not held; or the table of what is served.

use std::sync::Arc;

use clap::{Args as ClapArgs, ValueEnum};
use rapt::quant::{Form, Scheme};
use rapt::{
    Certificate, Codes, DType, Device, Engine, Error, Extent, Granularity, Operands, Options, Plan, Qkv, Result,
    ScaleLayout, Shape, Spec, Strides, TensorLayout, Tensors, View, ViewMut,
};
use serde_json::json;

use crate::codes::{CodesArgs, descale_shape, hinted, part_names};
use crate::options::ProblemArgs;
use crate::support;
use crate::{Outcome, exit, say, table};

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
    /// The dtype of out, and of those of q, k and v that are no codes.
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
    /// What each instruction set of this build serves, as Markdown; every cell is an answer of `select`.
    #[arg(long, conflicts_with = "shape")]
    support_table: bool,
    // Last: what follows would stand under its heading.
    #[command(flatten)]
    codes: CodesArgs,
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
        say(&support::markdown().trim_end())?;
        return Ok(exit::OK);
    };
    let (plan, certificate) = plan(args, shape, &args.codes.schemes()?).map_err(|error| hinted(error, true))?;
    if args.json {
        say(&format_args!("{:#}", as_json(&plan, &certificate)))?;
    } else {
        say(&table::framed(&plan.explain().certified(&certificate).rows()))?;
    }
    Ok(exit::OK)
}

/// The plan for row-major tensors of these sizes, and its certificate for tensors that lie one after another: what is
/// described and not held is declared, not proven.
fn plan(
    args: &Args,
    [batch, heads, q_len, kv_len, head_dim]: [usize; 5],
    schemes: &Qkv<Option<Scheme>>,
) -> Result<(Arc<Plan>, Certificate)> {
    let kv_heads = args.kv_heads.unwrap_or(heads);
    let head_dim_v = args.head_dim_v.unwrap_or(head_dim);
    let options = Options { out_dtype: schemes.q.map(|_| args.dtype), ..args.problem.options() };
    let mut place = Place::default();
    let mut operand = |tensor, scheme, sizes| place.operand(tensor, args.dtype, scheme, sizes, options.layout);
    let (q, q_codes) = operand("q", schemes.q, [batch, heads, q_len, head_dim])?;
    let (k, k_codes) = operand("k", schemes.k, [batch, kv_heads, kv_len, head_dim])?;
    let (v, v_codes) = operand("v", schemes.v, [batch, kv_heads, kv_len, head_dim_v])?;
    let codes = Qkv { q: q_codes, k: k_codes, v: v_codes };
    let mask_dtype = match args.mask {
        MaskName::None => None,
        MaskName::Bool => Some(DType::Bool),
        MaskName::Additive => Some(args.dtype.accumulation()),
    };
    let mask = mask_dtype.map(|dtype| place.input("mask", dtype, [batch, heads, q_len, kv_len].into())).transpose()?;
    let spec = Spec::builder(&q, &k, &v, &options).codes(codes.as_deref()).mask(mask.as_ref()).build()?;
    let plan = Engine::new(args.problem.threads)?.plan(&spec)?;
    let out = place.output("out", spec.out.dtype, spec.out_shape(4))?;
    let tensors = Tensors { codes, mask, ..Tensors::new(q, k, v, out) };
    let certificate = plan.certificate(&Operands::check(tensors, &spec)?)?;
    Ok((plan, certificate))
}

/// Addresses of tensors that do not exist, one after another, for a plan and its certificate alone.
#[derive(Default)]
struct Place {
    end: usize,
}

impl Place {
    /// Where a row-major tensor begins, and its strides.
    fn next(&mut self, tensor: &'static str, dtype: DType, shape: Shape) -> Result<(usize, Strides)> {
        let overflow = Error::Overflow { tensor, shape, strides: Strides::from([]) };
        let bytes = shape.numel().and_then(|n| n.checked_mul(dtype.size_bytes()));
        let start = self.end.checked_add(64).map(|end| end / 64 * 64);
        match (start, bytes, shape.contiguous()) {
            (Some(start), Some(bytes), Some(strides)) => {
                self.end = start.checked_add(bytes).ok_or(overflow)?;
                Ok((start, strides))
            }
            _ => Err(overflow),
        }
    }

    fn input(&mut self, tensor: &'static str, dtype: DType, shape: Shape) -> Result<View<'static>> {
        let (start, strides) = self.next(tensor, dtype, shape)?;
        let address = std::ptr::without_provenance(start);
        // SAFETY: no element is ever read: `plan` lets these views go, and runs nothing.
        unsafe { View::from_raw_parts(tensor, address, dtype, shape, strides, Device::Cpu, Extent::Declared) }
    }

    /// q, k or v of these sizes, `[batch, heads, len, dim]`: numbers, or codes with all that makes numbers of them.
    fn operand(
        &mut self,
        tensor: &'static str,
        dtype: DType,
        scheme: Option<Scheme>,
        [batch, heads, len, dim]: [usize; 4],
        layout: TensorLayout,
    ) -> Result<(View<'static>, Option<Box<Codes<'static>>>)> {
        let of = |dim| match layout {
            TensorLayout::Bhsd => Shape::from([batch, heads, len, dim]),
            TensorLayout::Bshd => Shape::from([batch, len, heads, dim]),
        };
        let Some(scheme) = scheme else { return Ok((self.input(tensor, dtype, of(dim))?, None)) };
        let (format, granularity) = (scheme.format(), scheme.granularity());
        let codes = self.input(tensor, format.code_dtype(), of(dim.div_ceil(format.codes_per_byte())))?;
        let shape = match scheme.scale_layout() {
            ScaleLayout::Plain => descale_shape([batch, heads, len, dim], granularity, layout),
            // Sizes that are none are refused with the operand.
            ScaleLayout::Swizzle32x4x4 => Form::new(scheme, [batch, heads, len, dim].into())
                .map_or_else(|_| Shape::from([]), |form| *form.scale_shape()),
        };
        let [descale, zero_point, _] = part_names(tensor);
        let descale = self.input(descale, format.scale_dtype(), shape)?;
        let zero_point = format.has_zero_point().then(|| self.input(zero_point, DType::U8, shape)).transpose()?;
        let parts = Codes {
            zero_point,
            global_scale: format.has_global_scale().then_some(1.0),
            // Blocks alone are not told by the shape where the last one is shorter.
            granularity: granularity.block_size().map(Granularity::Block),
            head_dim: Some(dim),
            scale_layout: scheme.scale_layout(),
            ..Codes::new(format, descale)
        };
        Ok((codes, Some(Box::new(parts))))
    }

    fn output(&mut self, tensor: &'static str, dtype: DType, shape: Shape) -> Result<ViewMut<'static>> {
        let (start, strides) = self.next(tensor, dtype, shape)?;
        let address = std::ptr::without_provenance_mut(start);
        // SAFETY: no element is ever written, as above.
        unsafe { ViewMut::from_raw_parts(tensor, address, dtype, shape, strides, Device::Cpu, Extent::Declared) }
    }
}

fn as_json(plan: &Plan, certificate: &Certificate) -> serde_json::Value {
    let words: serde_json::Map<String, serde_json::Value> =
        plan.explain().rows().into_iter().map(|(name, text)| (name.to_owned(), text.into())).collect();
    json!({
        "kernel": plan.key().kernel.name(),
        "isa": plan.key().arch.name(),
        "storage": plan.key().storage.name(),
        "accumulation": plan.key().accumulation.name(),
        "block_m": plan.block_m(),
        "block_n": plan.block_n(),
        "num_splits": plan.num_splits(),
        "items": plan.items(),
        "threads": plan.threads(),
        "workspace_bytes": plan.workspace_bytes(),
        "kv_in_place": plan.kv_in_place(),
        "flops": plan.cost().flops,
        "bytes_read": plan.cost().bytes_read,
        "bytes_written": plan.cost().bytes_written,
        "bytes_copied": plan.cost().bytes_copied,
        "bytes_packed": plan.cost().bytes_packed,
        "floor_cycles": plan.cost().floor_cycles,
        "floor_seconds": plan.cost().floor_seconds,
        "compute": plan.spec().compute.name(),
        "codes": codes_json(plan),
        "certificate": facts(certificate),
        "words": words,
    })
}

/// What is codes of q, k and v.
pub(crate) fn codes_json(plan: &Plan) -> serde_json::Value {
    let of = plan.spec().quantized().map(|(tensor, numbers, codes)| {
        let facts = json!({
            "format": codes.format.name(),
            "granularity": codes.granularity.name(),
            "block_size": codes.granularity.block_size(),
            "code_bytes": count(codes.code_bytes(numbers)),
            "scale_bytes": count(codes.scale_bytes()),
        });
        (tensor.to_owned(), facts)
    });
    of.collect::<serde_json::Map<_, _>>().into()
}

/// Counts beyond JSON's integers are numbers all the same, rounded.
fn count(n: u128) -> serde_json::Value {
    u64::try_from(n).map_or_else(|_| json!(n as f64), |n| json!(n))
}

fn facts(certificate: &Certificate) -> serde_json::Value {
    let Certificate { in_bounds, injective, disjoint, coverage, .. } = certificate;
    json!({
        "in_bounds": in_bounds.iter().map(|fact| json!({
            "tensor": fact.tensor,
            "elements": count(fact.elements),
            "bytes": fact.bytes,
            "storage": fact.storage,
            "extent": if fact.storage.is_some() { "proven" } else { "declared" },
        })).collect::<Vec<_>>(),
        "injective": injective.iter().map(|fact| json!({
            "tensor": fact.tensor,
            "elements": count(fact.elements),
            "steps": fact.steps,
        })).collect::<Vec<_>>(),
        "disjoint": disjoint.iter().map(|fact| json!({
            "tensor": fact.tensor,
            "other": fact.other,
            "steps": fact.steps,
        })).collect::<Vec<_>>(),
        "coverage": {
            "rows": count(coverage.rows),
            "items": coverage.items,
            "parts": coverage.parts,
            "tasks": coverage.work.map(|work| work.tasks),
            "rows_per_task": coverage.work.map(|work| work.rows),
            "rows_per_item": coverage.work.map(|work| work.rows_per_item),
            "keys_per_item": coverage.work.map(|work| work.keys_per_item),
        },
    })
}

/// `B,H,Sq,Skv,D`.
pub(crate) fn shape(text: &str) -> Result<[usize; 5], String> {
    let sizes: Vec<usize> = text
        .split(',')
        .map(|size| size.trim().parse().map_err(|_| format!("{size:?} is no size")))
        .collect::<Result<_, _>>()?;
    sizes.try_into().map_err(|sizes: Vec<usize>| format!("5 sizes are needed, B,H,Sq,Skv,D; got {}", sizes.len()))
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
