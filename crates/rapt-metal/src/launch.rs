//! A launch plan on a device: what is bound, and the dispatches, window by window. Whose device it is does not matter here.

use rapt_core::{Operands, Spec};
use rapt_shader::{BINDINGS, KernelVariant, PARTIALS, Params, ShaderLaunch};

use crate::error::Result;

/// Most workgroups of a dimension.
const MOST_GROUPS: usize = 65_535;

/// One dispatch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dispatch<'a, B> {
    /// The kernel.
    pub(crate) variant: &'a KernelVariant,
    /// Slot 0.
    pub(crate) params: &'a [u8],
    /// The other slots.
    pub(crate) bound: &'a [(u32, B)],
    /// Workgroups.
    pub(crate) groups: [usize; 2],
}

/// Where dispatches are encoded, one behind the other.
pub(crate) trait Encoder {
    /// Bytes of a tensor, from some byte on.
    type Bound: Clone;
    /// The bytes `address + lo..address + hi` of a tensor, of elements of `element_bytes`.
    fn bind(&self, name: &'static str, address: usize, reach: (i64, i64), element_bytes: usize) -> Result<Self::Bound>;
    /// Memory of its own.
    fn workspace(&self, bytes: usize) -> Result<Self::Bound>;
    /// Encodes one dispatch.
    fn dispatch(&mut self, dispatch: Dispatch<'_, Self::Bound>) -> Result<()>;
}

/// Encodes `launch`, which is of `spec`, on the tensors of `operands`.
pub(crate) fn encode<E: Encoder>(
    encoder: &mut E,
    launch: &ShaderLaunch,
    spec: &Spec,
    operands: &mut Operands<'_>,
) -> Result<()> {
    let operands = addresses(operands);
    let Some(variant) = &launch.variant else { return Ok(()) };
    for window in &launch.windows {
        let (mut bound, mut first) = (Vec::with_capacity(BINDINGS.len() + 1), [0; 8]);
        for (at, binding) in BINDINGS.iter().enumerate() {
            let Some(((address, size), reach)) = operands[at].zip(window.reach[at]) else { continue };
            bound.push((binding.index, encoder.bind(binding.tensor, address, (reach.lo, reach.hi), size)?));
            // From the first byte that is bound.
            first[at] = -reach.lo / size as i64;
        }
        // What a request does not have is bound to any tensor and not accessed.
        let any = bound.first().map(|(_, tensor)| tensor.clone());
        for binding in &BINDINGS {
            let is_bound = bound.iter().any(|(slot, _)| *slot == binding.index);
            bound.extend(any.clone().filter(|_| !is_bound).map(|any| (binding.index, any)));
        }
        let partial_bytes = launch.partial_bytes_of(window);
        if partial_bytes > 0 {
            bound.push((PARTIALS, encoder.workspace(partial_bytes)?));
        }
        let params = Params::new(spec, launch, window, first).bytes();
        let items = [launch.items_of(window), launch.combine_items_of(window)];
        for (variant, items) in std::iter::once(variant).chain(&launch.combine).zip(items) {
            let is_of = |(slot, _): &&(u32, E::Bound)| variant.bindings().iter().any(|binding| binding.index == *slot);
            let bound: Vec<(u32, E::Bound)> = bound.iter().filter(is_of).cloned().collect();
            let groups = [items.min(MOST_GROUPS), items.div_ceil(MOST_GROUPS)];
            encoder.dispatch(Dispatch { variant, params: &params, bound: &bound, groups })?;
        }
    }
    Ok(())
}

/// The address of element 0 and the size of an element.
type Operand = Option<(usize, usize)>;

/// Where the tensors of a request lie, in the order of [`BINDINGS`].
fn addresses(operands: &mut Operands<'_>) -> [Operand; 8] {
    let (out, lse) = (operands.out_ptr().addr(), operands.lse_ptr().map(<*mut u8>::addr));
    let tensors = operands.tensors();
    let view = |view: &rapt_core::View<'_>| (view.address(), view.dtype().size_bytes());
    let lse = lse.zip(tensors.lse.as_ref()).map(|(at, lse)| (at, lse.dtype().size_bytes()));
    [
        Some(view(&tensors.q)),
        Some(view(&tensors.k)),
        Some(view(&tensors.v)),
        tensors.mask.as_ref().map(view),
        tensors.sinks.as_ref().map(view),
        tensors.alibi_slopes.as_ref().map(view),
        Some((out, tensors.out.dtype().size_bytes())),
        lse,
    ]
}
