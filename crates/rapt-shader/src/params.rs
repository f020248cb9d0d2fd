//! A window's parameters, byte for byte `Params` of the text: one list is both.
//!
//! Strides and first elements are counted in elements, modulo 2^32, as the text adds them. Deliberately absent: any choice.

use rapt_core::{DType, Finite, Spec, TensorSpec};

use crate::launch::ShaderLaunch;
use crate::window::Window;

/// Declares [`Params`], the text of its struct and its bytes. Vectors come first, so that every field lies where the one before it ends.
macro_rules! params {
    ($($name:ident: $kind:ident = $wgsl:literal;)*) => {
        /// The parameters of a launch. Dtypes are export-schema codes, flags 0 or 1.
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct Params { $(pub(crate) $name: $kind,)* }

        impl Params {
            /// The struct as the text declares it.
            pub(crate) const WGSL: &'static str = concat!("struct Params {\n", $("    ", stringify!($name), ": ", $wgsl, ",\n",)* "}\n");

            /// The bytes of the buffer.
            #[must_use]
            pub fn bytes(&self) -> Vec<u8> {
                let mut bytes = Vec::with_capacity(Params::BYTES);
                $(self.$name.put(&mut bytes);)*
                bytes.resize(Params::BYTES, 0);
                bytes
            }

            /// The name of each field, and where it begins among the bytes.
            #[must_use]
            pub fn offsets() -> Vec<(&'static str, usize)> {
                let mut bytes = Vec::new();
                let mut offsets = Vec::new();
                $(offsets.push((stringify!($name), bytes.len())); Params::default().$name.put(&mut bytes);)*
                offsets
            }

            /// How many there are: a multiple of 16.
            pub const BYTES: usize = (0 $(+ size_of::<$kind>())*).next_multiple_of(16);
        }
    };
}

type Vector = [u32; 4];

params! {
    q_stride: Vector = "vec4<u32>";
    k_stride: Vector = "vec4<u32>";
    v_stride: Vector = "vec4<u32>";
    mask_stride: Vector = "vec4<u32>";
    out_stride: Vector = "vec4<u32>";
    lse_stride: Vector = "vec4<u32>";
    q_base: u32 = "u32";
    k_base: u32 = "u32";
    v_base: u32 = "u32";
    mask_base: u32 = "u32";
    sinks_base: u32 = "u32";
    alibi_base: u32 = "u32";
    out_base: u32 = "u32";
    lse_base: u32 = "u32";
    sinks_stride: u32 = "u32";
    alibi_stride: u32 = "u32";
    sinks_dtype: u32 = "u32";
    alibi_dtype: u32 = "u32";
    has_sinks: u32 = "u32";
    has_alibi: u32 = "u32";
    has_lse: u32 = "u32";
    items: u32 = "u32";
    first_task: u32 = "u32";
    first_row_block: u32 = "u32";
    row_blocks: u32 = "u32";
    dv_blocks: u32 = "u32";
    row_tiles: u32 = "u32";
    row_fours: u32 = "u32";
    num_splits: u32 = "u32";
    split_keys: u32 = "u32";
    combine_items: u32 = "u32";
    kv_heads: u32 = "u32";
    group_size: u32 = "u32";
    rows: u32 = "u32";
    q_len: u32 = "u32";
    kv_len: u32 = "u32";
    head_dim: u32 = "u32";
    head_dim_v: u32 = "u32";
    lo_shift: i32 = "i32";
    hi_shift: i32 = "i32";
    diagonal: i32 = "i32";
    scale: f32 = "f32";
    softcap: f32 = "f32";
    inverse_softcap: f32 = "f32";
}

/// A field's bytes.
trait Put {
    fn put(&self, bytes: &mut Vec<u8>);
}
macro_rules! put {
    ($($ty:ty),*) => { $(
        impl Put for $ty {
            fn put(&self, bytes: &mut Vec<u8>) {
                bytes.extend(self.to_le_bytes());
            }
        }
    )* };
}
put!(u32, i32, f32);
impl Put for Vector {
    fn put(&self, bytes: &mut Vec<u8>) {
        self.iter().for_each(|x| x.put(bytes));
    }
}

/// Lengths and positions below this keep every sum of three of them inside an i32.
pub(crate) const MOST_LEN: usize = 1 << 29;

/// `n` modulo 2^32.
const fn wrapped(n: i64) -> u32 {
    n as u32
}

/// Strides modulo 2^32, up to `N` of them; 0 where there is one element, whatever its stride says.
fn strides<const N: usize>(tensor: &TensorSpec<N>) -> Vector {
    let mut strides = [0; 4];
    for (to, (&n, &stride)) in strides.iter_mut().zip(tensor.shape.iter().zip(&tensor.strides)) {
        *to = if n > 1 { wrapped(stride as i64) } else { 0 };
    }
    strides
}

fn shift(n: i64) -> i32 {
    n.clamp(-(MOST_LEN as i64), MOST_LEN as i64) as i32
}

impl Params {
    /// The parameters of `window` of `launch`, which is of `spec`. `first`: where element 0 of each of [`BINDINGS`](crate::BINDINGS) lies, in elements from the
    /// first byte that is bound; it may lie before that.
    #[must_use]
    pub fn new(spec: &Spec, launch: &ShaderLaunch, window: &Window, first: [i64; 8]) -> Self {
        let [q_base, k_base, v_base, mask_base, sinks_base, alibi_base, out_base, lse_base] = first.map(wrapped);
        let int = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let dtype = |tensor: Option<TensorSpec<1>>| tensor.map_or(0, |tensor| u32::from(tensor.dtype.code()));
        let flag = u32::from;
        let range = spec.block_range();
        let (lo, hi) = range.shifts();
        // A cap beyond float32 caps none of its numbers.
        let most = f64::from(f32::MAX);
        let softcap = spec.softcap.map(Finite::get).filter(|cap| *cap <= most);
        let within = |x: f64| x.clamp(f64::from(f32::MIN_POSITIVE), most) as f32;
        Params {
            q_stride: strides(&spec.q),
            k_stride: strides(&spec.k),
            v_stride: strides(&spec.v),
            mask_stride: spec.mask.as_ref().map_or([0; 4], strides),
            out_stride: strides(&spec.out),
            lse_stride: spec.lse.as_ref().map_or([0; 4], strides),
            q_base,
            k_base,
            v_base,
            mask_base,
            sinks_base,
            alibi_base,
            out_base,
            lse_base,
            sinks_stride: spec.sinks.as_ref().map_or(0, |sinks| strides(sinks)[0]),
            alibi_stride: spec.alibi_slopes.as_ref().map_or(0, |slopes| strides(slopes)[0]),
            sinks_dtype: dtype(spec.sinks),
            alibi_dtype: dtype(spec.alibi_slopes),
            has_sinks: flag(spec.sinks.is_some()),
            has_alibi: flag(spec.alibi_slopes.is_some()),
            has_lse: flag(spec.lse.is_some()),
            items: int(launch.items_of(window)),
            first_task: int(window.tasks.start),
            first_row_block: int(window.row_blocks.start),
            row_blocks: int(window.row_blocks.len()),
            dv_blocks: int(launch.partition.dv_blocks),
            row_tiles: int(launch.partition.row_tiles),
            row_fours: int(launch.partition.row_fours),
            num_splits: int(launch.partition.num_splits),
            split_keys: int(launch.partition.split_keys),
            combine_items: int(launch.combine_items_of(window)),
            kv_heads: int(spec.num_kv_heads()),
            group_size: int(spec.group_size()),
            rows: int(spec.group_size() * spec.q_len()),
            q_len: int(spec.q_len()),
            kv_len: int(spec.kv_len()),
            head_dim: int(spec.head_dim()),
            head_dim_v: int(spec.head_dim_v()),
            lo_shift: shift(lo),
            hi_shift: shift(hi),
            diagonal: shift(range.diagonal),
            scale: spec.softmax_scale.get().clamp(-most, most) as f32,
            softcap: softcap.map_or(0.0, within),
            inverse_softcap: softcap.map_or(0.0, |cap| within(1.0 / cap)),
        }
    }
}

/// The dtypes that a vector of one number per head has.
pub(crate) const VECTOR_DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
