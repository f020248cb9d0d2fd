//! What a launch binds of the buffers in which tensors lie: ranges of bytes, the parameters that go with them, and workgroups.
//!
//! ```text
//! place (a buffer, its byte of element 0) + reach of a window ──► begin, a multiple of the device's alignment .. end, a multiple of a word
//! ```
//! Deliberately absent: buffers themselves, which are numbers here.

use rapt_core::{DType, Error, Result, Spec};

use crate::launch::ShaderLaunch;
use crate::matrices::MatrixTiles;
use crate::params::Params;
use crate::variant::{Algorithm, BINDINGS, KernelVariant};
use crate::window::{Range, Window};

/// Where a tensor lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The number of its buffer among those of the request.
    pub buffer: usize,
    /// How long that buffer is.
    pub buffer_bytes: u64,
    /// Where element 0 lies in it.
    pub offset_bytes: u64,
    /// Whether that buffer may be bound as storage.
    pub is_storage: bool,
}

/// The places of [`BINDINGS`]; `None` where the request has no such tensor.
pub type Places = [Option<Place>; 8];

/// Bytes of a buffer that are bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundRange {
    /// The first.
    pub offset_bytes: u64,
    /// How many.
    pub size_bytes: u64,
}

/// A window of a launch, with all that its dispatches take.
#[derive(Clone, Debug, PartialEq)]
pub struct BoundWindow {
    /// Of each of [`BINDINGS`] what is bound of its buffer; `None` where nothing of such a tensor is reached.
    pub ranges: [Option<BoundRange>; 8],
    /// The parameters.
    pub params: Params,
    /// The kernel: that of the launch, with loads of whole vectors where this window's k and v lie so. The same bits come of it.
    pub variant: Option<KernelVariant>,
    /// Workgroups of the kernel, and of the one that folds what it leaves: along x and y.
    pub groups: [(u32, u32); 2],
}

/// That every buffer may be bound, and what is written lies in a buffer of its own: a device takes no buffer to read and to write at once.
///
/// # Errors
/// [`Error::Unsupported`].
pub fn check_places(places: &Places) -> Result<()> {
    let named = || BINDINGS.iter().zip(places).filter_map(|(binding, place)| Some((binding, place.as_ref()?)));
    for (at, (binding, place)) in named().enumerate() {
        if !place.is_storage {
            let what = format!("a buffer of {} without usage STORAGE", binding.tensor);
            return Err(Error::unsupported(what, "kernels bind storage", "create it with usage STORAGE"));
        }
        let mut others = named().enumerate().filter(|(other, _)| *other != at);
        if let Some((_, (other, _))) = others.find(|(_, (_, of))| binding.is_output && of.buffer == place.buffer) {
            let what = format!("{} in the buffer of {}", binding.tensor, other.tensor);
            let why = "a dispatch takes no buffer to read and to write";
            return Err(Error::unsupported(what, why, "give it a buffer of its own"));
        }
    }
    Ok(())
}

/// The bytes that a window binds of a tensor, and where its element 0 lies, in elements from the first of them.
///
/// # Errors
/// [`Error::Unsupported`] where the last element's word is not wholly in the buffer.
fn range(name: &str, dtype: DType, place: &Place, reach: Range, alignment: u64) -> Result<(BoundRange, i64)> {
    // A tensor lies in its buffer: neither sum leaves it.
    let origin = place.offset_bytes.cast_signed();
    let (lo, hi) = ((origin + reach.lo).cast_unsigned(), (origin + reach.hi).cast_unsigned());
    let begin = lo / alignment * alignment;
    let end = hi.next_multiple_of(4);
    if end > place.buffer_bytes {
        let what = format!("{name} at the end of a buffer of {} bytes", place.buffer_bytes);
        return Err(Error::unsupported(
            what,
            "words of 4 bytes are bound",
            "make the buffer a multiple of 4 bytes long",
        ));
    }
    let first = (origin - begin.cast_signed()) / dtype.size_bytes() as i64;
    Ok((BoundRange { offset_bytes: begin, size_bytes: end - begin }, first))
}

/// `variant` for a window with `params`: with wide loads where it has them, and the window's rows of k and v are whole vectors of four words which lie
/// a multiple of such from the first byte that is bound.
fn for_window(variant: KernelVariant, params: &Params) -> KernelVariant {
    let Algorithm::Matrices(tiles) = variant.algorithm else { return variant };
    let loaded = tiles.loaded() as u32;
    let in_vectors = |base: u32, [batch, head, row, column]: [u32; 4], columns: u32| {
        column == 1 && [base, batch, head, row, columns].iter().all(|n| n.is_multiple_of(loaded))
    };
    let wide = tiles.has_wide_loads()
        && in_vectors(params.k_base, params.k_stride, params.head_dim)
        && in_vectors(params.v_base, params.v_stride, params.head_dim_v);
    KernelVariant { algorithm: Algorithm::Matrices(MatrixTiles { wide, ..tiles }), ..variant }
}

impl ShaderLaunch {
    /// `window` of this launch, which is of `spec`, with tensors at `places`. `alignment`: what the offset of a binding is a multiple of;
    /// `most_groups`: workgroups along one dimension.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the last element's word is not wholly in its buffer.
    pub fn bound(
        &self,
        spec: &Spec,
        window: &Window,
        places: &Places,
        alignment: u64,
        most_groups: usize,
    ) -> Result<BoundWindow> {
        let vector = |of: &Option<rapt_core::TensorSpec<1>>| of.map_or(DType::F32, |of| of.dtype);
        let dtypes = [
            spec.q.dtype,
            spec.k.dtype,
            spec.v.dtype,
            spec.mask.map_or(DType::Bool, |mask| mask.dtype),
            vector(&spec.sinks),
            vector(&spec.alibi_slopes),
            spec.out.dtype,
            spec.lse.map_or(DType::F32, |lse| lse.dtype),
        ];
        let (mut ranges, mut first) = ([None; 8], [0; 8]);
        for (at, binding) in BINDINGS.iter().enumerate() {
            if let (Some(place), Some(reach)) = (&places[at], window.reach[at]) {
                let (bound, first_element) = range(binding.tensor, dtypes[at], place, reach, alignment)?;
                (ranges[at], first[at]) = (Some(bound), first_element);
            }
        }
        let groups = [self.items_of(window), self.combine_items_of(window)]
            .map(|items| (items.min(most_groups) as u32, items.div_ceil(most_groups) as u32));
        let params = Params::new(spec, self, window, first);
        let variant = self.variant.map(|variant| for_window(variant, &params));
        Ok(BoundWindow { ranges, params, variant, groups })
    }
}
