//! A call of rapt_attention() as C makes it: the requests of `operands`, bent in what only C can bend.
//!
//! Data layout: after the request and its offsets, choices that bend one part of the call each: NULL and unaligned pointers,
//! codes and sizes of any value, numbers without their bit; and in some calls one of q, k and v is codes. Every tensor tells the arena as its storage, so that no word of
//! the caller is false and whatever is accepted may be run. Deliberately absent: pointers to nothing, which C cannot tell.

use std::ffi::{CStr, c_void};
use std::ptr::null;
use std::sync::OnceLock;

use arbitrary::{Result as Parsed, Unstructured};
use c::{
    rapt_attention, rapt_codes, rapt_device, rapt_engine, rapt_engine_create, rapt_error, rapt_explain, rapt_given,
    rapt_last_error, rapt_last_error_code, rapt_options, rapt_string_free, rapt_tensor,
};
use rapt::{Causal, DType, Format, Shape, Strides, TensorLayout};

use crate::arbitrary::{Request, TensorDesc, once_in};
use crate::operands::{ARENA, Bytes, Offsets, contents, descs, filled, parse};

/// The engine of every call, as an address: it may be used from any thread.
struct Owned(*mut rapt_engine);
// SAFETY: promised by rapt_engine_create().
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

pub(crate) fn engine() -> *mut rapt_engine {
    static ENGINE: OnceLock<Owned> = OnceLock::new();
    ENGINE.get_or_init(|| Owned(rapt_engine_create(1))).0
}

/// Whether the bytes describe a call that is served.
///
/// # Panics
/// If a refusal says nothing or changes a byte, a call writes what is not its own, or the same call answers otherwise.
#[must_use]
pub fn c_abi(data: &[u8]) -> bool {
    let mut u = Unstructured::new(data);
    let Ok((request, offsets)) = parse(&mut u) else { return false };
    let mut call = Call::new(&request, offsets);
    if call.bend(&mut u).is_err() || call.quantize(&mut u).is_err() {
        return false;
    }
    call.run(offsets)
}

/// Everything behind the pointers of one call.
struct Call {
    arena: Vec<u64>,
    arrays: [([i64; 8], [i64; 8]); 8],
    tensors: [Option<rapt_tensor>; 8],
    options: rapt_options,
    quantized: Option<Parts>,
    /// Which of engine, q, k, v, out and options are NULL, and which lie one byte off.
    bent: [Bent; 6],
}

/// What makes numbers of one of q, k and v.
struct Parts {
    at: usize,
    codes: rapt_codes,
    descale: rapt_tensor,
    zero_point: rapt_tensor,
    sizes: [i64; 5],
    steps: [i64; 5],
    global_scale: f32,
    has_zero_point: bool,
    has_global_scale: bool,
    has_descale: bool,
}

impl Parts {
    /// Makes the pointers lead to one another, and says where the codes are.
    fn linked(&mut self) -> &rapt_codes {
        for tensor in [&mut self.descale, &mut self.zero_point] {
            (tensor.shape, tensor.strides) = (self.sizes.as_ptr(), self.steps.as_ptr());
        }
        let given = |is_given: bool, pointer| if is_given { pointer } else { null() };
        self.codes.descale = given(self.has_descale, &raw const self.descale);
        self.codes.zero_point = given(self.has_zero_point, &raw const self.zero_point);
        if self.has_global_scale {
            self.codes.global_scale = &raw const self.global_scale;
        }
        &self.codes
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Bent {
    No,
    Null,
    Unaligned,
}

impl Bent {
    fn apply<T>(self, pointer: *const T) -> *const T {
        match self {
            Bent::No => pointer,
            Bent::Null => null(),
            Bent::Unaligned => pointer.wrapping_byte_add(1),
        }
    }
}

impl Call {
    fn new(request: &Request, offsets: Offsets) -> Self {
        let arena = filled().to_vec();
        let base = arena.as_ptr().cast::<u8>().cast_mut();
        let mut arrays = [([0; 8], [0; 8]); 8];
        let mut tensors = [None; 8];
        for (n, desc) in descs(request).into_iter().enumerate() {
            let Some(desc) = desc else { continue };
            for (d, (&size, &stride)) in desc.shape.iter().zip(desc.strides.iter()).enumerate() {
                arrays[n].0[d] = size as i64;
                arrays[n].1[d] = stride as i64;
            }
            tensors[n] = Some(rapt_tensor {
                data: base.wrapping_add(offsets[n]).cast::<c_void>(),
                dtype: i32::from(desc.dtype.code()),
                device: rapt_device::RAPT_DEVICE_CPU as i32,
                device_index: 0,
                ndim: desc.shape.len() as i32,
                shape: null(),
                strides: null(),
                storage_bytes: ARENA as i64,
                storage: base.cast(),
            });
        }
        let asked = &request.options;
        let (mut given, window) = (0, asked.window);
        let bits = [
            (asked.softmax_scale.is_some(), rapt_given::RAPT_GIVEN_SOFTMAX_SCALE),
            (asked.softcap.is_some(), rapt_given::RAPT_GIVEN_SOFTCAP),
            (window.left.is_some(), rapt_given::RAPT_GIVEN_WINDOW_LEFT),
            (window.right.is_some(), rapt_given::RAPT_GIVEN_WINDOW_RIGHT),
        ];
        for (_, bit) in bits.into_iter().filter(|(is_given, _)| *is_given) {
            given |= bit as u32;
        }
        let options = rapt_options {
            size: size_of::<rapt_options>(),
            given,
            causal: match asked.causal {
                None => 0,
                Some(Causal::TopLeft) => 1,
                Some(Causal::BottomRight) => 2,
            },
            layout: i32::from(asked.layout == TensorLayout::Bshd),
            out_dtype: asked.out_dtype.map_or(0, |dtype| i32::from(dtype.code())),
            softmax_scale: asked.softmax_scale.unwrap_or(0.0),
            softcap: asked.softcap.unwrap_or(0.0),
            window_left: window.left.map_or(0, |keys| keys as i64),
            window_right: window.right.map_or(0, |keys| keys as i64),
            mask: null(),
            sinks: null(),
            alibi_slopes: null(),
            lse: null(),
            q_codes: null(),
            k_codes: null(),
            v_codes: null(),
            tolerance: null(),
            compute: asked.compute as i32,
            dropout_p: asked.dropout_p,
            dropout_seed: 0,
            dropout_offset: 0,
            dropout_draw: null(),
        };
        Call { arena, arrays, tensors, options, quantized: None, bent: [Bent::No; 6] }
    }

    /// Changes one part in about a quarter of the calls.
    fn bend(&mut self, u: &mut Unstructured<'_>) -> Parsed<()> {
        if !once_in(u, 4)? {
            return Ok(());
        }
        let at = usize::from(u.int_in_range(0..=7u8)?);
        let code: i32 = u.arbitrary()?;
        match u.int_in_range(0..=12u8)? {
            0 => self.bent[at % 6] = Bent::Null,
            1 => self.bent[at % 6] = Bent::Unaligned,
            2 => self.options.size = code as usize,
            3 => self.options.given = code.cast_unsigned(),
            4 => self.options.causal = code,
            5 => self.options.layout = code,
            6 => self.options.out_dtype = code,
            12 => self.options.compute = code,
            kind => {
                let Some(tensor) = &mut self.tensors[at] else { return Ok(()) };
                match kind {
                    7 => tensor.dtype = code,
                    8 => tensor.device = code,
                    9 => tensor.device_index = code,
                    // More dimensions than the arrays hold are refused before they are read.
                    10 => tensor.ndim = if code % 2 == 0 { code } else { code % 9 },
                    _ => tensor.storage_bytes = i64::from(code).clamp(i64::MIN, ARENA as i64),
                }
                // What is not told is taken at its word, which would be false here.
                if matches!(tensor.storage_bytes, 0 | -1) {
                    tensor.storage_bytes = 1;
                }
            }
        }
        Ok(())
    }

    /// Makes codes of one of q, k and v in about a quarter of the calls, with factors and zero points somewhere in the arena.
    fn quantize(&mut self, u: &mut Unstructured<'_>) -> Parsed<()> {
        if !once_in(u, 4)? {
            return Ok(());
        }
        let at = usize::from(u.int_in_range(0..=2u8)?);
        let Some(tensor) = &mut self.tensors[at] else { return Ok(()) };
        let rank = usize::try_from(tensor.ndim).unwrap_or(0).min(4);
        let Some(last) = rank.checked_sub(1) else { return Ok(()) };
        let format = *u.choose(&Format::ALL)?;
        let shape = &mut self.arrays[at].0;
        let head_dim = shape[last];
        tensor.dtype = i32::from(format.code_dtype().code());
        let mut sizes: Vec<i64> = shape[..rank].to_vec();
        if format.codes_per_byte() == 2 {
            shape[last] = head_dim.saturating_add(1) / 2;
        }
        let mut codes = rapt_codes {
            size: size_of::<rapt_codes>(),
            format: 1 + Format::ALL.iter().position(|known| *known == format).unwrap_or(0) as i32,
            granularity: 0,
            block_size: 0,
            head_dim: if format.codes_per_byte() == 2 { head_dim } else { 0 },
            descale: null(),
            zero_point: null(),
            global_scale: null(),
            scale_layout: 0,
        };
        match (format.own_block_size(), u.int_in_range(0..=4u8)?) {
            (Some(size), _) => sizes[last] = head_dim.saturating_add(size as i64 - 1) / size as i64,
            (None, 0) => sizes.truncate(last),
            (None, 1) => sizes.clear(),
            (None, 2) => sizes.truncate(rank.saturating_sub(2)),
            (None, 3) => sizes[rank.saturating_sub(2)] = 1,
            (None, _) => (codes.granularity, codes.block_size, sizes[last]) = (5, 2, head_dim.saturating_add(1) / 2),
        }
        let mut parts = Parts {
            at,
            codes,
            descale: self.part(format.scale_dtype(), u.arbitrary()?, sizes.len()),
            zero_point: self.part(DType::U8, u.arbitrary()?, sizes.len()),
            sizes: [0; 5],
            steps: [0; 5],
            global_scale: 0.5,
            has_zero_point: format.has_zero_point(),
            has_global_scale: format.has_global_scale(),
            has_descale: true,
        };
        let is_repeated = once_in(u, 4)?;
        let mut step = 1i64;
        for (d, size) in sizes.into_iter().enumerate().rev() {
            (parts.sizes[d], parts.steps[d]) = (size, if is_repeated { 0 } else { step });
            step = step.saturating_mul(size.max(1));
        }
        if once_in(u, 4)? {
            let code: i32 = u.arbitrary()?;
            match u.int_in_range(0..=9u8)? {
                0 => parts.codes.size = code as usize,
                1 => parts.codes.format = code,
                2 => parts.codes.granularity = code % 8,
                3 => parts.codes.block_size = i64::from(code),
                4 => parts.codes.head_dim = i64::from(code),
                5 => parts.has_descale = false,
                6 => parts.has_zero_point = !parts.has_zero_point,
                7 => parts.has_global_scale = !parts.has_global_scale,
                8 => parts.descale.dtype = code % 40,
                _ => parts.sizes[0] = i64::from(code),
            }
        }
        self.quantized = Some(parts);
        Ok(())
    }

    /// A tensor of the arena that has no sizes yet.
    fn part(&self, dtype: DType, offset: u16, rank: usize) -> rapt_tensor {
        let base = self.arena.as_ptr().cast::<u8>().cast_mut();
        let size = dtype.size_bytes().max(1);
        rapt_tensor {
            data: base.wrapping_add(usize::from(offset) % ARENA / size * size).cast::<c_void>(),
            dtype: i32::from(dtype.code()),
            device: rapt_device::RAPT_DEVICE_CPU as i32,
            device_index: 0,
            ndim: rank as i32,
            shape: null(),
            strides: null(),
            storage_bytes: ARENA as i64,
            storage: base.cast(),
        }
    }

    /// The bytes of an accepted tensor, as its struct says.
    fn said(&self, n: usize, offset: usize) -> Option<Bytes> {
        let tensor = self.tensors[n].as_ref()?;
        let rank = tensor.ndim as usize;
        let sizes: Vec<usize> = self.arrays[n].0[..rank].iter().map(|&size| size as usize).collect();
        let steps: Vec<isize> = self.arrays[n].1[..rank].iter().map(|&stride| stride as isize).collect();
        let dtype = DType::from_code(tensor.dtype as u8).ok()?;
        Some(Bytes::of(&TensorDesc { dtype, shape: Shape::new(&sizes)?, strides: Strides::new(&steps)? }, offset))
    }

    fn run(mut self, offsets: Offsets) -> bool {
        for (tensor, (shape, strides)) in self.tensors.iter_mut().zip(&self.arrays) {
            if let Some(tensor) = tensor {
                (tensor.shape, tensor.strides) = (shape.as_ptr(), strides.as_ptr());
            }
        }
        let tensors = &self.tensors;
        let at = |n: usize| tensors[n].as_ref().map_or(null(), std::ptr::from_ref);
        (self.options.mask, self.options.sinks) = (at(3), at(4));
        (self.options.alibi_slopes, self.options.lse) = (at(5), at(7));
        if let Some(parts) = &mut self.quantized {
            let at = parts.at;
            let codes: *const rapt_codes = parts.linked();
            *[&mut self.options.q_codes, &mut self.options.k_codes, &mut self.options.v_codes][at] = codes;
        }
        let base = self.arena.as_mut_ptr().cast::<u8>();
        let before = contents(base);
        let [of_engine, of_q, of_k, of_v, of_out, of_options] = self.bent;
        let engine = of_engine.apply(engine().cast_const());
        let (q, k, v, out) = (of_q.apply(at(0)), of_k.apply(at(1)), of_v.apply(at(2)), of_out.apply(at(6)));
        let options = of_options.apply(&raw const self.options);
        // SAFETY: every pointer leads to what it says, or is NULL or unaligned; every tensor tells its storage.
        let answer = unsafe { rapt_attention(engine, q, k, v, out, options) };
        let after = contents(base);
        if answer == rapt_error::RAPT_OK {
            let mut restored = after.clone();
            let outputs = [6, 7].into_iter().filter(|&n| n == 6 || !options.is_null());
            for desc in outputs.filter_map(|n| self.said(n, offsets[n])) {
                desc.each(|byte| restored[byte] = before[byte]);
            }
            assert!(restored == before, "a byte outside out and lse was written");
        } else {
            // SAFETY: the message of this thread.
            let message = unsafe { CStr::from_ptr(rapt_last_error()) };
            assert!(message.count_bytes() > 8 && rapt_last_error_code() == answer, "{answer:?} says {message:?}");
            assert_ne!(answer, rapt_error::RAPT_ERROR_INTERNAL, "{message:?}");
            assert!(after == before, "a refused call wrote");
        }
        let mut text = std::ptr::null_mut();
        // SAFETY: as above.
        let explained = unsafe { rapt_explain(engine, q, k, v, out, options, &raw mut text) };
        assert_eq!(explained, answer, "explain and attention agree on what is served");
        assert_eq!(text.is_null(), answer != rapt_error::RAPT_OK);
        // SAFETY: of rapt_explain(), or NULL.
        unsafe { rapt_string_free(text) };
        if answer != rapt_error::RAPT_OK {
            return false;
        }
        // Once more, now that the call is known.
        // SAFETY: as above.
        let again = unsafe { rapt_attention(engine, q, k, v, out, options) };
        assert!(again == answer && contents(base) == after, "the same call, the same bits");
        true
    }
}
