//! A plan as kernels of MLX: `mx.fast.metal_kernel` takes the inside of a kernel, and writes its parameters itself.
//!
//! ```text
//! header   the text of the variant up to its kernel; a small input lies in the constant address space, as MLX declares it
//! source   the parameters, with the strides that MLX tells of each input; workgroup memory; the call
//! ```
//! Python does not learn an array's strides, which are known when it is computed: the kernel gets them (`q_strides`), and puts them into `Params`. An array whose elements
//! lie further apart than 2^31 elements gives NaN, not another's numbers. Deliberately absent: MLX.

use std::fmt::Write;

use rapt_core::{Error, LaunchPlan, Result, Spec};
use rapt_shader::{Caps, KernelVariant, Params, ShaderLaunch, select};

/// Inputs of fewer elements lie in the constant address space.
const LEAST_IN_DEVICE: usize = 8;

/// One kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MlxKernel {
    /// By which MLX keeps what it compiled: of another name where the text is another.
    pub name: String,
    /// The names of its inputs; `params` is the first, an array of uint32.
    pub inputs: Vec<&'static str>,
    /// Those of its outputs: `out`, `lse` or `partials`.
    pub outputs: Vec<&'static str>,
    /// What stands before the kernel.
    pub header: String,
    /// What stands in it.
    pub source: String,
    /// Threads, in all.
    pub grid: [usize; 3],
    /// Threads of a workgroup.
    pub threadgroup: [usize; 3],
}

/// A request as kernels of MLX.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MlxLaunch {
    /// In their order: what one leaves in `partials` the next takes.
    pub kernels: Vec<MlxKernel>,
    /// The parameters, byte for byte.
    pub params: Vec<u8>,
    /// How many words `partials` has.
    pub partials: usize,
}

/// Which dimension of an array is a dimension of the request: of rank `rank`, in the order in which it was given.
#[derive(Clone, Copy, Debug)]
pub struct Dimensions {
    /// How many the array has.
    pub rank: usize,
    /// Whether the third-last one is the length, and the second-last the heads.
    pub bshd: bool,
}

impl Dimensions {
    /// The array's dimension that is dimension `d` of `of`.
    fn of(self, d: usize, of: usize) -> Option<usize> {
        let at = (self.rank + d).checked_sub(of)?;
        let swaps = self.bshd && self.rank >= 3 && of >= 3;
        Some(match of - d {
            3 if swaps => at + 1,
            2 if swaps => at - 1,
            _ => at,
        })
    }
}

/// The kernels of `spec`, whose arrays lie row by row, in place of ones whose strides are not known. `given`: the dimensions of q, k, v and the mask.
///
/// # Errors
/// As [`select`](rapt_shader::select()); [`Error::Unsupported`] for a request of several windows.
pub fn mlx(spec: &Spec, given: [Dimensions; 4]) -> Result<MlxLaunch> {
    let plan = select(spec, &Caps::METAL)?;
    let launch = plan.launch_plan::<ShaderLaunch>()?;
    let Some(variant) = &launch.variant else {
        return Ok(MlxLaunch { kernels: Vec::new(), params: Vec::new(), partials: 0 });
    };
    let [window] = &*launch.windows else {
        let why = "an array of MLX is bound whole, and kernels count in 31 bits";
        return Err(Error::unsupported("more than 2^31 bytes of one tensor", why, "call it for each batch entry"));
    };
    let params = Params::new(spec, launch, window, [0; 8]).bytes();
    let items = [launch.items_of(window), launch.combine_items_of(window)];
    let kernels = std::iter::once(variant).chain(&launch.combine).zip(items);
    let kernels = kernels.map(|(variant, items)| kernel(spec, variant, items, given)).collect();
    Ok(MlxLaunch { kernels, params, partials: launch.workspace_bytes() / 4 })
}

/// Most workgroups of a dimension.
const MOST_GROUPS: usize = 65_535;

fn kernel(spec: &Spec, variant: &KernelVariant, items: usize, given: [Dimensions; 4]) -> MlxKernel {
    let text = variant.msl();
    let (head, inside) = text.split_once("[[kernel").unwrap_or((&text, ""));
    let numel = |shape: &[usize]| shape.iter().product::<usize>();
    let size = |tensor: &str| match tensor {
        "q" => numel(&spec.q.shape),
        "k" => numel(&spec.k.shape),
        "v" => numel(&spec.v.shape),
        // As it was given, without what broadcasts.
        "mask" => spec.mask.map_or(0, |mask| {
            mask.shape.iter().zip(mask.strides).map(|(&n, stride)| if stride == 0 { 1 } else { n }).product()
        }),
        "sinks" | "alibi" => spec.num_q_heads(),
        _ => usize::MAX,
    };
    let has = |tensor: &str| match tensor {
        "mask" => spec.mask.is_some(),
        "sinks" => spec.sinks.is_some(),
        "alibi" => spec.alibi_slopes.is_some(),
        "lse" => spec.lse.is_some(),
        _ => true,
    };
    let is_small = |tensor: &str| has(tensor) && size(tensor) < LEAST_IN_DEVICE;
    let (mut inputs, mut outputs) = (vec!["params"], Vec::new());
    for binding in variant.bindings().iter().filter(|binding| has(binding.tensor)) {
        if binding.is_output { outputs.push(binding.tensor) } else { inputs.push(binding.tensor) }
    }

    let mut header = head.replacen("constant Params& p;", "Params p;", 1);
    let mut arguments = vec!["p".to_owned()];
    for binding in variant.bindings() {
        let tensor = binding.tensor;
        let declared = declaration(head, tensor);
        let ty = match is_small(tensor) {
            true => declared.replacen("const device", "const constant", 1),
            false => declared.clone(),
        };
        header = header.replacen(&format!("{declared} {tensor};"), &format!("{ty} {tensor};"), 1);
        // What the request does not have is not read; the parameters are never small.
        let from = match (has(tensor), binding.is_output) {
            (true, _) => tensor,
            (false, true) => "out",
            (false, false) => "params",
        };
        arguments.push(format!("({ty}){from}"));
    }

    let mut source = "    Params p = *(const device Params*)params;\n".to_owned();
    for (tensor, given) in ["q", "k", "v", "mask"].into_iter().zip(given) {
        if inputs.contains(&tensor) {
            write_strides(&mut source, tensor, given);
        }
    }
    for vector in ["sinks", "alibi"].into_iter().filter(|vector| inputs.contains(vector)) {
        let _ = writeln!(source, "    p.{vector}_stride = uint({vector}_strides[0]);");
    }
    for line in inside.lines().filter(|line| line.starts_with("    threadgroup ")) {
        let _ = writeln!(source, "{line}");
        let name = line.trim_start_matches("    threadgroup ").split([' ', '[', ';']).nth(1).unwrap_or_default();
        arguments.push(name.to_owned());
    }
    let arguments = arguments.join(", ");
    let simdgroup = if variant.has_subgroups() { ", simdgroup_index_in_threadgroup" } else { "" };
    let _ = writeln!(
        source,
        "    Attention{{{arguments}}}.attention(threadgroup_position_in_grid, threadgroups_per_grid, thread_index_in_threadgroup{simdgroup});"
    );
    let threads = variant.threads();
    let small: String =
        variant.bindings().iter().filter(|binding| is_small(binding.tensor)).map(|binding| binding.tensor).collect();
    let given: String =
        given.iter().map(|given| format!("{}{}", given.rank, if given.bshd { "s" } else { "h" })).collect();
    let name: String = format!("rapt_{variant}_{}_{small}_{given}", inputs.concat())
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
        .collect();
    MlxKernel {
        name,
        inputs,
        outputs,
        header,
        source,
        grid: [items.min(MOST_GROUPS) * threads, items.div_ceil(MOST_GROUPS), 1],
        threadgroup: [threads, 1, 1],
    }
}

/// The type of a member of `Attention`.
fn declaration(head: &str, name: &str) -> String {
    let end = format!(" {name};");
    let line = head.lines().find(|line| line.contains("device") && line.ends_with(&end));
    line.map_or_else(String::new, |line| line.trim().trim_end_matches(&end).to_owned())
}

/// The lines that put an input's strides into the parameters: 0 where there is one element, which may stand for many. No length is in them, so that a kernel serves all.
fn write_strides(source: &mut String, tensor: &str, given: Dimensions) {
    let each = |of: &dyn Fn(usize) -> String| {
        (0..4).map(|d| given.of(d, 4).map_or_else(|| "0u".to_owned(), of)).collect::<Vec<_>>()
    };
    let parts = each(&|at| format!("{tensor}_shape[{at}] > 1 ? uint({tensor}_strides[{at}]) : 0u"));
    let reach = each(&|at| {
        let stride = format!("{tensor}_strides[{at}]");
        format!("({tensor}_shape[{at}] - 1L) * ({stride} < 0 ? -{stride} : {stride})")
    });
    let _ = writeln!(source, "    p.{tensor}_stride = uint4({});", parts.join(", "));
    let _ = writeln!(
        source,
        "    if ((({}) >> 31) != 0) {{ p.{tensor}_stride = uint4(0u); p.scale = as_type<float>(0x7fc00000u); }}",
        reach.join(" + ")
    );
}
