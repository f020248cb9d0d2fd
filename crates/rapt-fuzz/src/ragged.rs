//! Sequences of different lengths as C gives them: each has the bits of a call alone, or the call is refused and changes nothing.
//!
//! Data layout: one arena of numbers, tensors in it as `operands` places them, and offsets, lengths and page tables written where their tensors
//! lie: those of the lengths that were drawn, and now and then one of any value. Deliberately absent: codes, which `sequences` has.

use std::ffi::CStr;
use std::ptr::null;

use arbitrary::{Result as Parsed, Unstructured};
use c::{
    rapt_attention, rapt_attention_with_kvcache, rapt_causal, rapt_error, rapt_given, rapt_kvcache, rapt_last_error,
    rapt_last_error_code, rapt_options, rapt_tensor, rapt_varlen_attention,
};
use rapt::{COMPUTED, DType};

use crate::arbitrary::{Scale, TensorDesc, once_in, tensor};
use crate::c::engine;
use crate::next;
use crate::operands::{ARENA, Bytes, contents, place};

/// The tensors of both functions, by their places.
const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const OUT: usize = 3;
const LSE: usize = 4;
const SINKS: usize = 5;
/// Offsets of queries, or lengths.
const FIRST: usize = 6;
/// Offsets of keys, or pages.
const SECOND: usize = 7;
const K_CACHE: usize = 8;
const V_CACHE: usize = 9;

/// Numbers of every dtype: each two bytes are the upper half of a number of about 1.
pub(crate) fn numbers(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let pair = |n: u64| [n as u8, if n & 256 == 0 { 0x3f } else { 0xbf }];
    (0..len.div_ceil(2)).flat_map(|_| pair(next(&mut state))).collect()
}

/// A row-major tensor with memory of its own.
pub(crate) struct Dense {
    words: Vec<u64>,
    len: usize,
    shape: Vec<i64>,
    strides: Vec<i64>,
    dtype: DType,
}

impl Dense {
    pub(crate) fn new(dtype: DType, shape: &[usize], bytes: &[u8]) -> Self {
        let mut words = vec![0u64; bytes.len().div_ceil(8) + 1];
        for (at, byte) in bytes.iter().enumerate() {
            words[at / 8] |= u64::from(*byte) << (at % 8 * 8);
        }
        let strides = (0..shape.len()).map(|d| shape[d + 1..].iter().product::<usize>() as i64).collect();
        Dense { words, len: bytes.len(), shape: shape.iter().map(|size| *size as i64).collect(), strides, dtype }
    }

    pub(crate) fn zeros(dtype: DType, shape: &[usize]) -> Self {
        Dense::new(dtype, shape, &vec![0; shape.iter().product::<usize>() * dtype.size_bytes()])
    }

    pub(crate) fn tensor(&mut self) -> rapt_tensor {
        rapt_tensor {
            data: self.words.as_mut_ptr().cast(),
            dtype: self.dtype.code().into(),
            device: 1,
            device_index: 0,
            ndim: self.shape.len() as i32,
            shape: self.shape.as_ptr(),
            strides: self.strides.as_ptr(),
            storage_bytes: (self.words.len() * 8) as i64,
            storage: null(),
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|word| word.to_le_bytes()).take(self.len).collect()
    }
}

/// The sizes of one sequence alone.
#[derive(Clone, Copy)]
pub(crate) struct Alone {
    pub(crate) dtype: DType,
    pub(crate) q_len: usize,
    pub(crate) kv_len: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) dims: [usize; 2],
}

impl Alone {
    /// The bytes of `out` and `lse` that rapt_attention() gives.
    pub(crate) fn run(&self, [q, k, v]: [&[u8]; 3], sinks: Option<&[u8]>, options: rapt_options) -> [Vec<u8>; 2] {
        let Alone { dtype, q_len, kv_len, heads, kv_heads, dims } = *self;
        let mut q = Dense::new(dtype, &[q_len, heads, dims[0]], q);
        let mut k = Dense::new(dtype, &[kv_len, kv_heads, dims[0]], k);
        let mut v = Dense::new(dtype, &[kv_len, kv_heads, dims[1]], v);
        let (mut out, mut lse) =
            (Dense::zeros(dtype, &[q_len, heads, dims[1]]), Dense::zeros(dtype.accumulation(), &[heads, q_len]));
        let mut sinks = sinks.map(|sinks| Dense::new(dtype, &[heads], sinks));
        let (of_lse, of_sinks) = (lse.tensor(), sinks.as_mut().map(Dense::tensor));
        let sinks = of_sinks.as_ref().map_or(null(), std::ptr::from_ref);
        let options = rapt_options { layout: 1, lse: &raw const of_lse, sinks, ..options };
        // SAFETY: tensors with memory of their own.
        let answer =
            unsafe { rapt_attention(engine(), &q.tensor(), &k.tensor(), &v.tensor(), &out.tensor(), &options) };
        check_answer(answer);
        assert_eq!(answer, rapt_error::RAPT_OK, "each sequence is served alone");
        [out.bytes(), lse.bytes()]
    }
}

/// What every answer owes.
pub(crate) fn check_answer(answer: rapt_error) {
    if answer != rapt_error::RAPT_OK {
        // SAFETY: the message of this thread.
        let message = unsafe { CStr::from_ptr(rapt_last_error()) };
        assert!(message.count_bytes() > 8 && rapt_last_error_code() == answer, "{answer:?} says {message:?}");
        assert_ne!(answer, rapt_error::RAPT_ERROR_INTERNAL, "{message:?}");
    }
}

pub(crate) fn no_options() -> rapt_options {
    // SAFETY: zero and NULL are values of each field.
    rapt_options { size: size_of::<rapt_options>(), ..unsafe { std::mem::zeroed() } }
}

/// Options of which each means the same to a sequence alone.
pub(crate) fn options(u: &mut Unstructured<'_>) -> Parsed<rapt_options> {
    let mut options = no_options();
    if u.arbitrary()? {
        options.causal = rapt_causal::RAPT_CAUSAL_BOTTOM_RIGHT as i32;
        if once_in(u, 3)? {
            options.given |= rapt_given::RAPT_GIVEN_WINDOW_LEFT as u32;
            options.window_left = u.int_in_range(0..=5)?;
        }
    }
    if once_in(u, 4)? {
        options.given |= rapt_given::RAPT_GIVEN_SOFTMAX_SCALE as u32;
        options.softmax_scale = f64::from(u.arbitrary::<i8>()?) / 8.0;
    }
    Ok(options)
}

/// A tensor in the arena.
struct Placed {
    desc: TensorDesc,
    at: usize,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

impl Placed {
    fn new(desc: TensorDesc, at: usize) -> Self {
        let shape = desc.shape.iter().map(|size| *size as i64).collect();
        Placed { desc, at, shape, strides: desc.strides.iter().map(|stride| *stride as i64).collect() }
    }

    fn tensor(&self, base: *mut u8) -> rapt_tensor {
        rapt_tensor {
            data: base.wrapping_add(self.at).cast(),
            dtype: self.desc.dtype.code().into(),
            device: 1,
            device_index: 0,
            ndim: self.shape.len() as i32,
            shape: self.shape.as_ptr(),
            strides: self.strides.as_ptr(),
            storage_bytes: ARENA as i64,
            storage: base.cast(),
        }
    }

    /// The first byte of an element; anything for one outside the arena.
    fn byte(&self, index: &[usize]) -> usize {
        let size = self.desc.dtype.size_bytes() as isize;
        let step = |(at, stride): (&usize, &isize)| (*at as isize).wrapping_mul(*stride).wrapping_mul(size);
        let offset = index.iter().zip(self.desc.strides.iter()).map(step).fold(0isize, isize::wrapping_add);
        self.at.wrapping_add_signed(offset)
    }

    /// The bytes of the elements below `index`, in order.
    fn elements(&self, arena: &[u8], index: &[usize]) -> Vec<u8> {
        let size = self.desc.dtype.size_bytes();
        match self.desc.shape.get(index.len()) {
            None => arena[self.byte(index)..][..size].to_vec(),
            Some(&n) => (0..n).flat_map(|at| self.elements(arena, &[index, &[at]].concat())).collect(),
        }
    }

    /// Writes int32s, as far as they lie in the arena.
    fn fill(&self, arena: &mut [u8], rows: &[Vec<i32>]) {
        for (b, row) in rows.iter().enumerate() {
            for (at, number) in row.iter().enumerate() {
                let index = if self.desc.shape.len() == 2 { vec![b, at] } else { vec![at] };
                let byte = self.byte(&index);
                if let Some(place) = arena.get_mut(byte..byte.wrapping_add(4)) {
                    place.copy_from_slice(&number.to_le_bytes());
                }
            }
        }
    }

    fn int(&self, arena: &[u8], index: &[usize]) -> usize {
        let bytes = self.elements(arena, index);
        i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize
    }
}

/// A call: its tensors by place, its arena, its options.
struct Call {
    arena: Vec<u64>,
    tensors: [Option<Placed>; 10],
    options: rapt_options,
    dtype: DType,
}

/// What is drawn of both functions.
struct Drawn {
    dtype: DType,
    heads: [usize; 2],
    dims: [usize; 2],
    tensors: [Option<Placed>; 10],
    end: usize,
}

impl Drawn {
    fn new(u: &mut Unstructured<'_>) -> Parsed<Self> {
        let dtype = COMPUTED[u.choose_index(COMPUTED.len())?];
        let small = |u: &mut Unstructured<'_>, most: usize| u.int_in_range(1..=most);
        let kv_heads = small(u, 2)?;
        let heads = [kv_heads * small(u, 2)?, kv_heads];
        let dims = [small(u, 5)?, small(u, 4)?];
        Ok(Drawn { dtype, heads, dims, tensors: [const { None }; 10], end: 0 })
    }

    fn put(&mut self, u: &mut Unstructured<'_>, n: usize, dtype: DType, sizes: &[usize]) -> Parsed<()> {
        let desc = tensor(u, dtype, sizes, Scale::Small)?;
        let at = place(u, &desc, &mut self.end)?;
        self.tensors[n] = Some(Placed::new(desc, at));
        Ok(())
    }

    /// `lse` and `sinks` in some calls, then the call, with tables in its arena; once in a while one of its tensors is missing.
    fn call(mut self, u: &mut Unstructured<'_>, lse: &[usize], tables: [&[Vec<i32>]; 2]) -> Parsed<Call> {
        if u.arbitrary()? {
            self.put(u, LSE, self.dtype.accumulation(), lse)?;
        }
        if once_in(u, 4)? {
            self.put(u, SINKS, self.dtype, &[self.heads[0]])?;
        }
        let options = options(u)?;
        if once_in(u, 24)? {
            self.tensors[u.int_in_range(0..=9usize)?] = None;
        }
        let mut bytes = numbers(ARENA, u64::from(u.arbitrary::<u8>()?));
        for (n, rows) in [FIRST, SECOND].into_iter().zip(tables) {
            if let Some(table) = &self.tensors[n] {
                table.fill(&mut bytes, rows);
            }
        }
        let word = |chunk: &[u8]| chunk.iter().rev().fold(0u64, |word, byte| word << 8 | u64::from(*byte));
        let arena = bytes.chunks(8).map(word).collect();
        Ok(Call { arena, tensors: self.tensors, options, dtype: self.dtype })
    }
}

/// One number of any value, once in `n`.
fn bend(u: &mut Unstructured<'_>, rows: &mut [Vec<i32>], n: u8) -> Parsed<()> {
    if once_in(u, n)? && !rows.is_empty() {
        let row = &mut rows[u.choose_index(rows.len())?];
        if !row.is_empty() {
            let at = u.choose_index(row.len())?;
            row[at] = if u.arbitrary()? { i32::from(u.arbitrary::<i8>()?) / 16 } else { u.arbitrary()? };
        }
    }
    Ok(())
}

impl Call {
    fn run(&mut self, is_varlen: bool) -> Option<[Vec<u8>; 2]> {
        let base = self.arena.as_mut_ptr().cast::<u8>();
        let tensors = self.tensors.each_ref().map(|placed| placed.as_ref().map(|placed| placed.tensor(base)));
        let at = |n: usize| tensors[n].as_ref().map_or(null(), std::ptr::from_ref);
        let options = rapt_options { lse: at(LSE), sinks: at(SINKS), ..self.options };
        let cache = rapt_kvcache {
            size: size_of::<rapt_kvcache>(),
            k_cache: at(K_CACHE),
            v_cache: at(V_CACHE),
            cache_seqlens: at(FIRST),
            page_table: at(SECOND),
            k: at(K),
            v: at(V),
        };
        let before = contents(base);
        // SAFETY: every pointer leads to what it says, or is NULL; every tensor tells its storage.
        let answer = unsafe {
            if is_varlen {
                rapt_varlen_attention(engine(), at(Q), at(K), at(V), at(FIRST), at(SECOND), at(OUT), &options)
            } else {
                rapt_attention_with_kvcache(engine(), at(Q), &cache, at(OUT), &options)
            }
        };
        check_answer(answer);
        let after = contents(base);
        if answer == rapt_error::RAPT_OK {
            return Some([before, after]);
        }
        assert!(after == before, "a refused call wrote");
        None
    }

    fn placed(&self, n: usize) -> &Placed {
        self.tensors[n].as_ref().expect("a call that is served has it")
    }

    fn size(&self, n: usize, d: usize) -> usize {
        self.placed(n).desc.shape[d]
    }

    fn alone(&self, q_len: usize, kv_len: usize, [k, v]: [usize; 2]) -> Alone {
        let rank = self.placed(k).desc.shape.len();
        let (q, dims) = (self.placed(Q).desc.shape, [k, v].map(|n| self.size(n, rank - 1)));
        let (heads, kv_heads) = (q[q.len() - 2], self.size(k, rank - 2));
        Alone { dtype: self.placed(Q).desc.dtype, q_len, kv_len, heads, kv_heads, dims }
    }

    fn sinks(&self, arena: &[u8]) -> Option<Vec<u8>> {
        self.tensors[SINKS].as_ref().map(|sinks| sinks.elements(arena, &[]))
    }

    /// What is written beside `own` is as it was.
    fn check_untouched(&self, [before, after]: [&[u8]; 2], own: &[usize]) {
        let mut restored = after.to_vec();
        own.iter().for_each(|&byte| restored[byte] = before[byte]);
        for placed in [OUT, LSE].into_iter().filter_map(|n| self.tensors[n].as_ref()) {
            Bytes::of(&placed.desc, placed.at).each(|byte| restored[byte] = before[byte]);
        }
        assert!(restored == before, "a byte that is not the call's was written");
    }
}

/// Equal bits; what is NaN in both is equal.
pub(crate) fn assert_same(dtype: DType, got: &[u8], expected: &[u8], what: &str) {
    let is_nan = |x: &[u8]| match dtype {
        DType::F64 => f64::from_le_bytes(x.try_into().expect("eight bytes")).is_nan(),
        DType::F32 => f32::from_le_bytes(x.try_into().expect("four bytes")).is_nan(),
        DType::F16 => x[1] & 0x7c == 0x7c,
        _ => x[1] & 0x7f == 0x7f && x[0] & 0x80 != 0,
    };
    let size = dtype.size_bytes();
    let same = |(x, y): (&[u8], &[u8])| x == y || is_nan(x) && is_nan(y);
    let same = got.len() == expected.len() && got.chunks(size).zip(expected.chunks(size)).all(same);
    assert!(same, "{what}: {got:?}, alone {expected:?}");
}

fn ends(lengths: &[usize]) -> Vec<i32> {
    let mut ends = vec![0];
    lengths.iter().for_each(|length| ends.push(ends[ends.len() - 1] + *length as i32));
    ends
}

fn parse_varlen(u: &mut Unstructured<'_>) -> Parsed<Call> {
    let mut drawn = Drawn::new(u)?;
    let sequences = u.int_in_range(0..=3usize)?;
    let lengths = |u: &mut Unstructured<'_>, most| -> Parsed<Vec<usize>> {
        (0..sequences).map(|_| u.int_in_range(0..=most)).collect()
    };
    let (q_lens, kv_lens) = (lengths(u, 3)?, lengths(u, 5)?);
    let (total, keys) = (q_lens.iter().sum(), kv_lens.iter().sum());
    let (mut of_q, mut of_kv) = ([ends(&q_lens)], [ends(&kv_lens)]);
    bend(u, &mut of_q, 8)?;
    bend(u, &mut of_kv, 8)?;
    let Drawn { dtype, heads, dims, .. } = drawn;
    drawn.put(u, Q, dtype, &[total, heads[0], dims[0]])?;
    drawn.put(u, K, dtype, &[keys, heads[1], dims[0]])?;
    drawn.put(u, V, dtype, &[keys, heads[1], dims[1]])?;
    drawn.put(u, OUT, dtype, &[total, heads[0], dims[1]])?;
    drawn.put(u, FIRST, DType::I32, &[sequences + 1])?;
    drawn.put(u, SECOND, DType::I32, &[sequences + 1])?;
    drawn.call(u, &[heads[0], total], [&of_q, &of_kv])
}

/// Whether the bytes describe sequences, one after another, that are served.
///
/// # Panics
/// If a refusal says nothing or changes a byte, a call writes what is not its own, or a sequence has other bits than alone.
#[must_use]
pub fn varlen(data: &[u8]) -> bool {
    let Ok(mut call) = parse_varlen(&mut Unstructured::new(data)) else { return false };
    let Some([before, after]) = call.run(true) else { return false };
    call.check_untouched([&before, &after], &[]);
    let sinks = call.sinks(&before);
    let (first, last) =
        (call.placed(FIRST).int(&before, &[0]), call.placed(FIRST).int(&before, &[call.size(FIRST, 0) - 1]));
    for row in (0..first).chain(last..call.size(OUT, 0)) {
        assert!(call.placed(OUT).elements(&after, &[row]).iter().all(|byte| *byte == 0), "a row of no sequence");
    }
    for b in 0..call.size(FIRST, 0) - 1 {
        let range = |n: usize| call.placed(n).int(&before, &[b])..call.placed(n).int(&before, &[b + 1]);
        let (queries, keys) = (range(FIRST), range(SECOND));
        let rows = |n: usize, arena: &[u8], range: std::ops::Range<usize>| -> Vec<u8> {
            range.flat_map(|row| call.placed(n).elements(arena, &[row])).collect()
        };
        let parts = [rows(Q, &before, queries.clone()), rows(K, &before, keys.clone()), rows(V, &before, keys.clone())];
        let alone = call.alone(queries.len(), keys.len(), [K, V]);
        let [out, lse] = alone.run(parts.each_ref().map(Vec::as_slice), sinks.as_deref(), call.options);
        assert_same(call.dtype, &rows(OUT, &after, queries.clone()), &out, "out");
        if let Some(placed) = &call.tensors[LSE] {
            let of_head = |head| queries.clone().flat_map(move |row| [head, row].to_vec());
            let indices: Vec<usize> = (0..alone.heads).flat_map(of_head).collect();
            let got: Vec<u8> = indices.chunks(2).flat_map(|index| placed.elements(&after, index)).collect();
            assert_same(call.dtype.accumulation(), &got, &lse, "lse");
        }
    }
    true
}

fn parse_kvcache(u: &mut Unstructured<'_>) -> Parsed<Call> {
    let mut drawn = Drawn::new(u)?;
    let (batch, q_len) = (u.int_in_range(0..=3usize)?, u.int_in_range(1..=2usize)?);
    let (new, is_paged) = (u.int_in_range(0..=2usize)?, !once_in(u, 3)?);
    let rows = if is_paged { u.int_in_range(1..=3usize)? } else { 6 };
    let lengths = (0..batch).map(|_| u.int_in_range(0..=4usize)).collect::<Parsed<Vec<usize>>>()?;
    let taken: Vec<usize> = lengths.iter().map(|length| (length + new).div_ceil(rows)).collect();
    let entries = taken.iter().copied().max().unwrap_or(0) + usize::from(u.arbitrary::<bool>()?);
    let blocks = if is_paged { taken.iter().sum::<usize>().max(1) } else { batch };
    let mut pages = (0..blocks as i32).rev();
    let row = |taken: &usize| -> Vec<i32> {
        (0..entries).map(|at| if at < *taken { pages.next().unwrap_or(0) } else { -1 }).collect()
    };
    let mut table: Vec<Vec<i32>> = taken.iter().map(row).collect();
    let mut seqlens = [lengths.iter().map(|length| *length as i32).collect()];
    bend(u, &mut table, 8)?;
    bend(u, &mut seqlens, 8)?;
    let Drawn { dtype, heads, dims, .. } = drawn;
    drawn.put(u, Q, dtype, &[batch, q_len, heads[0], dims[0]])?;
    drawn.put(u, K_CACHE, dtype, &[blocks, rows, heads[1], dims[0]])?;
    drawn.put(u, V_CACHE, dtype, &[blocks, rows, heads[1], dims[1]])?;
    if new > 0 {
        drawn.put(u, K, dtype, &[batch, new, heads[1], dims[0]])?;
        drawn.put(u, V, dtype, &[batch, new, heads[1], dims[1]])?;
    }
    drawn.put(u, OUT, dtype, &[batch, q_len, heads[0], dims[1]])?;
    drawn.put(u, FIRST, DType::I32, &[batch])?;
    if is_paged {
        drawn.put(u, SECOND, DType::I32, &[batch, entries])?;
    }
    drawn.call(u, &[batch, heads[0], q_len], [&seqlens, &table])
}

/// Where key `j` of sequence `b` lies in a cache.
fn key(call: &Call, arena: &[u8], b: usize, j: usize) -> [usize; 2] {
    let rows = call.size(K_CACHE, 1);
    match &call.tensors[SECOND] {
        Some(table) => [table.int(arena, &[b, j / rows]), j % rows],
        None => [b, j],
    }
}

/// Whether the bytes describe a cache and a call that is served on it.
///
/// # Panics
/// As [`varlen`]; if new keys lie elsewhere than lengths and pages say.
#[must_use]
pub fn kvcache(data: &[u8]) -> bool {
    let Ok(mut call) = parse_kvcache(&mut Unstructured::new(data)) else { return false };
    let Some([before, after]) = call.run(false) else { return false };
    let (batch, q_len) = (call.size(Q, 0), call.size(Q, 1));
    let new = if call.tensors[K].is_some() { call.size(K, 1) } else { 0 };
    let mut own = Vec::new();
    let sinks = call.sinks(&before);
    for b in 0..batch {
        let length = call.tensors[FIRST].as_ref().map_or(call.size(K_CACHE, 1), |first| first.int(&before, &[b]));
        for (from, to) in [(K, K_CACHE), (V, V_CACHE)] {
            let Some(from) = &call.tensors[from] else { continue };
            for i in 0..new {
                let at = key(&call, &before, b, length + i);
                let got = call.placed(to).elements(&after, &at);
                assert!(got == from.elements(&before, &[b, i]), "a new key lies where it belongs");
                let size = from.desc.dtype.size_bytes();
                for (head, d) in (0..call.size(to, 2)).flat_map(|h| (0..call.size(to, 3)).map(move |d| (h, d))) {
                    let byte = call.placed(to).byte(&[at[0], at[1], head, d]);
                    own.extend(byte..byte + size);
                }
            }
        }
        let rows = |n: usize| -> Vec<u8> {
            (0..length + new).flat_map(|j| call.placed(n).elements(&after, &key(&call, &before, b, j))).collect()
        };
        let parts = [call.placed(Q).elements(&before, &[b]), rows(K_CACHE), rows(V_CACHE)];
        let alone = call.alone(q_len, length + new, [K_CACHE, V_CACHE]);
        let [out, lse] = alone.run(parts.each_ref().map(Vec::as_slice), sinks.as_deref(), call.options);
        assert_same(call.dtype, &call.placed(OUT).elements(&after, &[b]), &out, "out");
        if let Some(placed) = &call.tensors[LSE] {
            assert_same(call.dtype.accumulation(), &placed.elements(&after, &[b]), &lse, "lse");
        }
    }
    call.check_untouched([&before, &after], &own);
    true
}
