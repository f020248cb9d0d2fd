//! Tensors of the testkit bound as they lie: of each its window and not a byte more, element 0 where the parameters say.

use std::sync::Arc;

use rapt_core::{DType, Device, Error, Kernel, Operands, Result, Spec, Tensors, View};
use rapt_shader::{BINDINGS, Caps, KernelVariant, PARTIALS, Params, ShaderLaunch, select, select_kernel};

use crate::host::{Bound, Compiled};

/// Workgroups of a row of a launch: few, so that launches have several rows, and workgroups of no item.
const MOST_GROUPS: usize = 5;

/// So few blocks that problems of both kinds are small ones.
pub(crate) const CAPS: Caps = Caps { few_blocks: 3, ..Caps::METAL };

/// The answer of whoever compiles.
pub(crate) type Program = std::result::Result<Arc<Compiled>, String>;

/// An engine for [`rapt_testkit::conformance`]: with this kernel or those that `select` chooses, of programs that `compile` makes.
pub(crate) fn engine(
    kernel: Option<Kernel>,
    compile: impl Fn(&KernelVariant) -> Program,
) -> impl FnMut(&Spec, Tensors<'_>) -> Result<(), Error> {
    engine_with(CAPS, kernel, compile)
}

/// The same of a device with `caps`.
pub(crate) fn engine_with(
    caps: Caps,
    kernel: Option<Kernel>,
    compile: impl Fn(&KernelVariant) -> Program,
) -> impl FnMut(&Spec, Tensors<'_>) -> Result<(), Error> {
    move |spec, tensors| {
        let plan = match kernel {
            Some(kernel) => select_kernel(spec, &caps, kernel)?,
            None => select(spec, &caps)?,
        };
        let launch = plan.launch_plan::<ShaderLaunch>().expect("a plan of this crate");
        run(spec, launch, &mut Operands::check(tensors, spec)?, &compile)
            .map_err(|why| Error::DeviceFailed { device: Device::Cpu, why })
    }
}

fn run(
    spec: &Spec,
    launch: &ShaderLaunch,
    operands: &mut Operands<'_>,
    compile: &impl Fn(&KernelVariant) -> Program,
) -> std::result::Result<(), String> {
    let outputs = [(6, Some(operands.out_ptr())), (7, operands.lse_ptr())];
    let tensors = operands.tensors();
    let inputs = [Some(&tensors.q), Some(&tensors.k), Some(&tensors.v), tensors.mask.as_ref()];
    let inputs = inputs.into_iter().chain([tensors.sinks.as_ref(), tensors.alibi_slopes.as_ref()]);
    let address =
        |view: Option<&View<'_>>| view.map(|view| std::ptr::with_exposed_provenance_mut::<u8>(view.address()));
    let mut element_0: Vec<Option<*mut u8>> = inputs.map(address).collect();
    element_0.extend(outputs.map(|(_, at)| at));
    let size = [spec.numerics.storage; 3].map(Some).into_iter().chain([
        spec.mask.map(|mask| mask.dtype),
        spec.sinks.map(|sinks| sinks.dtype),
        spec.alibi_slopes.map(|slopes| slopes.dtype),
        Some(spec.out.dtype),
        spec.lse.map(|lse| lse.dtype),
    ]);
    let size: Vec<usize> = size.map(|dtype| dtype.map_or(1, DType::size_bytes)).collect();

    for window in &launch.windows {
        let mut first = [0; 8];
        let mut bound = Vec::new();
        for (at, binding) in BINDINGS.iter().enumerate() {
            let Some((begin, reach)) = element_0[at].zip(window.reach[at]) else { continue };
            first[at] = -reach.lo / size[at] as i64;
            bound.push(Bound {
                index: binding.index,
                name: binding.tensor,
                begin: begin.wrapping_offset(reach.lo as isize),
                len_bytes: reach.len_bytes() as usize,
                is_output: binding.is_output,
            });
        }
        let params = Params::new(spec, launch, window, first);
        let mut partials = vec![u128::MAX; launch.partial_bytes_of(window) / 16];
        let items = [launch.items_of(window), launch.combine_items_of(window)];
        for (variant, items) in launch.variant.iter().chain(&launch.combine).zip(items) {
            let of_kernel = |bound: &&Bound| variant.bindings().iter().any(|binding| binding.index == bound.index);
            let mut bound: Vec<Bound> = bound.iter().filter(of_kernel).map(|bound| Bound { ..*bound }).collect();
            if let Some(binding) = variant.bindings().iter().find(|binding| binding.index == PARTIALS) {
                bound.push(Bound {
                    index: PARTIALS,
                    name: binding.tensor,
                    begin: partials.as_mut_ptr().cast(),
                    len_bytes: partials.len() * 16,
                    is_output: binding.is_output,
                });
            }
            let groups = (items.min(MOST_GROUPS) as u32, items.div_ceil(MOST_GROUPS) as u32);
            let program = compile(variant)?;
            program.run(variant.threads(), groups, &params, &bound).map_err(|why| format!("{variant}: {why}"))?;
        }
    }
    Ok(())
}
