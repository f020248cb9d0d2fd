//! The support table: what `select` says to each request on each instruction set that this build has kernels for.
//!
//! No cell is written by hand: a request becomes a spec, `select` is asked for each dtype and each kernel, and a cell holds
//! what was served. Deliberately absent: this machine. An instruction set stands here if the build has its kernels.

use comfy_table::Table;
use comfy_table::presets::ASCII_MARKDOWN;
use rapt::{Arch, COMPUTED, Caps, Causal, DType, Kernel, Options, Result, Shape, Spec, Strides, View, select};

const ARCHES: [Arch; 8] =
    [Arch::Scalar, Arch::Avx2, Arch::Avx512, Arch::Avx512Vnni, Arch::Avx512Bf16, Arch::Amx, Arch::Neon, Arch::NeonBf16];

/// Queries of one request per kernel: many, and one token.
const KERNELS: [(Kernel, usize); 2] = [(Kernel::Forward, 64), (Kernel::Decode, 1)];

const KV_LEN: usize = 96;
const HEADS: usize = 4;
const HEAD_DIM: usize = 64;

/// A row of the table: what differs from the plain request.
#[derive(Clone, Copy, Default)]
struct Request {
    name: &'static str,
    options: Options,
    kv_heads: Option<usize>,
    head_dim_v: Option<usize>,
    mask: Option<Mask>,
    sinks: bool,
    alibi_slopes: bool,
    lse: bool,
    /// float32 for the other dtypes, bfloat16 for float32.
    other_out: bool,
    strides: Walk,
}

#[derive(Clone, Copy)]
enum Mask {
    Bool,
    /// One row for every head and query.
    Broadcast,
    Additive,
}

/// How the elements of q, k and v lie.
#[derive(Clone, Copy, Default)]
enum Walk {
    #[default]
    Contiguous,
    Negative,
    InnerApart,
    Expanded,
}

fn requests() -> Vec<Request> {
    let plain = Request { name: "plain", ..Request::default() };
    let with = |name, options| Request { name, options, ..Request::default() };
    let default = Options::default();
    vec![
        plain,
        with("causal, top left", default.with_causal(Causal::TopLeft)),
        with("causal, bottom right", default.with_causal(Causal::BottomRight)),
        with("sliding window", default.with_window(Some(16), Some(4))),
        Request { name: "boolean mask", mask: Some(Mask::Bool), ..plain },
        Request { name: "boolean mask, broadcast", mask: Some(Mask::Broadcast), ..plain },
        Request { name: "additive mask", mask: Some(Mask::Additive), ..plain },
        with("softcap", default.with_softcap(30.0)),
        Request { name: "sinks", sinks: true, ..plain },
        Request { name: "ALiBi", alibi_slopes: true, ..plain },
        Request { name: "grouped heads (GQA)", kv_heads: Some(2), ..plain },
        Request { name: "one key head (MQA)", kv_heads: Some(1), ..plain },
        Request { name: "head_dim_v ≠ head_dim", head_dim_v: Some(40), ..plain },
        Request { name: "negative strides", strides: Walk::Negative, ..plain },
        Request { name: "inner stride ≠ 1", strides: Walk::InnerApart, ..plain },
        Request { name: "expanded k and v (stride 0)", strides: Walk::Expanded, ..plain },
        with("[batch, len, heads, head_dim] in place", default.with_layout(rapt::TensorLayout::Bshd)),
        Request { name: "lse", lse: true, ..plain },
        Request { name: "another output dtype", other_out: true, ..plain },
    ]
}

/// Memory that the views of one spec lie in; its contents are never read.
struct Ground<T> {
    elements: Vec<T>,
}

impl<T: rapt::Element> Ground<T> {
    fn view(&self, tensor: &'static str, shape: [usize; 4], walk: Walk) -> Result<View<'_>> {
        let row_major = Shape::from(shape).contiguous().unwrap_or(Strides::from([0; 4]));
        let last = shape.iter().product::<usize>().saturating_sub(1);
        let [b, h, s, d] = [row_major[0], row_major[1], row_major[2], row_major[3]];
        let (offset, strides) = match walk {
            Walk::Contiguous => (0, [b, h, s, d]),
            Walk::Negative => (last, [-b, -h, -s, -d]),
            Walk::InnerApart => (0, [2 * b, 2 * h, 2 * s, 2 * d]),
            Walk::Expanded => (0, [0, 0, s, d]),
        };
        View::strided(tensor, &self.elements, offset, shape.into(), strides.into())
    }
}

/// What select answers to `request` in `dtype`.
fn served(request: &Request, dtype: DType, arch: Arch, kernel: (Kernel, usize)) -> Result<bool> {
    match dtype {
        DType::F64 => served_in::<f64>(request, 0.0, arch, kernel),
        DType::F32 => served_in::<f32>(request, 0.0, arch, kernel),
        DType::F16 => served_in(request, half::f16::ZERO, arch, kernel),
        DType::BF16 => served_in(request, half::bf16::ZERO, arch, kernel),
        _ => Ok(false),
    }
}

fn served_in<T: rapt::Element>(
    request: &Request,
    zero: T,
    arch: Arch,
    (kernel, q_len): (Kernel, usize),
) -> Result<bool> {
    let ground = Ground { elements: vec![zero; 2 * HEADS * KV_LEN * HEAD_DIM] };
    let truths = Ground { elements: vec![true; HEADS * KV_LEN * KV_LEN] };
    let biases = Ground { elements: vec![zero; HEADS * KV_LEN * KV_LEN] };
    let (kv_heads, head_dim_v) = (request.kv_heads.unwrap_or(HEADS), request.head_dim_v.unwrap_or(HEAD_DIM));
    let of = |heads, len, dim| match request.options.layout {
        rapt::TensorLayout::Bhsd => [1, heads, len, dim],
        rapt::TensorLayout::Bshd => [1, len, heads, dim],
    };
    let q_walk = if matches!(request.strides, Walk::Expanded) { Walk::Contiguous } else { request.strides };
    let q = ground.view("q", of(HEADS, q_len, HEAD_DIM), q_walk)?;
    let k = ground.view("k", of(kv_heads, KV_LEN, HEAD_DIM), request.strides)?;
    let v = ground.view("v", of(kv_heads, KV_LEN, head_dim_v), request.strides)?;
    let mask = match request.mask {
        None => None,
        Some(Mask::Bool) => Some(truths.view("mask", [1, HEADS, q_len, KV_LEN], Walk::Contiguous)?),
        Some(Mask::Broadcast) => Some(truths.view("mask", [1, 1, 1, KV_LEN], Walk::Contiguous)?),
        Some(Mask::Additive) => Some(biases.view("mask", [1, HEADS, q_len, KV_LEN], Walk::Contiguous)?),
    };
    let per_head = View::contiguous("sinks", &ground.elements[..HEADS], [HEADS].into())?;
    let other = if T::DTYPE == DType::F32 { DType::BF16 } else { DType::F32 };
    let options = Options { out_dtype: request.other_out.then_some(other), ..request.options };
    let spec = Spec::builder(&q, &k, &v, &options)
        .mask(mask.as_ref())
        .sinks(request.sinks.then_some(&per_head))
        .alibi_slopes(request.alibi_slopes.then_some(&per_head))
        .return_lse(request.lse)
        .build()?;
    let plan = select(&spec, &Caps { arch, threads: 1, clock_hz: None });
    Ok(plan.is_ok_and(|plan| plan.key().kernel == kernel && plan.cost().bytes_copied == 0))
}

/// What one instruction set serves of one request: all of it, nothing, or a list.
fn cell(request: &Request, arch: Arch) -> String {
    let mut yes = Vec::new();
    for dtype in COMPUTED {
        for kernel in KERNELS {
            if served(request, dtype, arch, kernel).unwrap_or(false) {
                yes.push(format!("{dtype} {}", kernel.0.name()));
            }
        }
    }
    match yes.len() {
        0 => "no".to_owned(),
        n if n == COMPUTED.len() * KERNELS.len() => "all".to_owned(),
        _ => yes.join(", "),
    }
}

/// What to do instead of a dtype that is refused.
fn instead(dtype: DType) -> &'static str {
    match dtype {
        DType::Unknown => "name the dtype",
        DType::I16 => "convert to float32, which holds each of its numbers",
        DType::C32 | DType::C64 | DType::C128 => "attention on complex numbers is not defined here",
        DType::F8E4M3FN | DType::F8E5M2 | DType::F8E4M3FNUZ | DType::F8E5M2FNUZ => {
            "multiply by its scales into float16 or bfloat16"
        }
        DType::F8E8M0FNU => "it holds the scales of another tensor: apply them there",
        DType::Bool => "as q, k or v: convert to float32; as a mask it is served",
        DType::U16 => "if the bits are bfloat16: view as bfloat16; numbers: convert to float32",
        DType::I32 | DType::I64 | DType::U32 | DType::U64 => {
            "convert to float64, or to float32 where its precision is enough"
        }
        _ => "convert to float32, or multiply by its scales into float16 or bfloat16",
    }
}

fn markdown_table(header: Vec<String>) -> Table {
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN).set_header(header);
    table
}

/// Both tables.
pub(crate) fn markdown() -> String {
    let requests = requests();
    let built: Vec<Arch> =
        ARCHES.into_iter().filter(|&arch| requests.iter().any(|request| cell(request, arch) != "no")).collect();
    let mut header = vec!["request".to_owned()];
    header.extend(built.iter().map(|arch| arch.name().to_owned()));
    let mut table = markdown_table(header);
    for request in &requests {
        let mut row = vec![request.name.to_owned()];
        row.extend(built.iter().map(|&arch| cell(request, arch)));
        table.add_row(row);
    }
    let computed: Vec<&str> = COMPUTED.iter().map(|dtype| dtype.name()).collect();
    let kernels: Vec<&str> = KERNELS.iter().map(|(kernel, _)| kernel.name()).collect();
    let mut refused = markdown_table(vec!["refused dtype".to_owned(), "instead".to_owned()]);
    for &dtype in DType::ALL.iter().filter(|dtype| !dtype.is_computed()) {
        refused.add_row([dtype.name(), instead(dtype)]);
    }
    format!(
        "`all`: in {}, by the {} kernels, on the CPU of an {} build.\n\n{}\n\n{}\n",
        computed.join(", "),
        kernels.join(" and "),
        std::env::consts::ARCH,
        trimmed(&table),
        trimmed(&refused)
    )
}

/// The table's lines without blanks at their ends.
fn trimmed(table: &Table) -> String {
    table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_stands_in_the_tables_and_the_instruction_sets_of_this_machine_too() {
        let text = markdown();
        for dtype in DType::ALL {
            assert!(text.contains(dtype.name()), "{dtype}");
        }
        for arch in rapt::available_isas() {
            assert!(text.contains(arch.name()), "{}", arch.name());
        }
        assert!(!text.contains(" no "), "a request without any service is an entry to look at: {text}");
    }

    #[test]
    fn a_request_that_does_not_stand_is_no() {
        let odd = Request { kv_heads: Some(3), ..Request::default() };
        assert_eq!(cell(&odd, Arch::Scalar), "no");
    }
}
