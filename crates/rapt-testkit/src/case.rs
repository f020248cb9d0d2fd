//! A case: one problem, named by plain values, so that its `Debug` is the reproducer.
//!
//! Sizes lean towards tails (one less and one more than every tile), masks come in every broadcast pattern, and data
//! come in shapes that break online softmax. Deliberately absent: memory; see [`TensorBuf`](crate::TensorBuf).

use rapt_core::{COMPUTED, Causal, Compute, DType, DropoutSeed, Options, Qkv, TensorLayout, Window};

use crate::memory::Guard;
use crate::quantized::{CodesCase, ScaleValues, random_codes};
use crate::rng::Rng;
use crate::scalar::{lowest, round};
use crate::zoo::{Placement, output_zoo, zoo};

/// How scores run along a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Data {
    /// N(0, 1) everywhere.
    Normal,
    /// Each key scores higher than the one before: every block moves the max.
    Rising,
    /// One late key towers over the rest.
    Spike,
    /// Every key is the same: the row is the mean of v.
    Equal,
    /// Logits in the hundreds.
    Huge,
}

/// A mask's dtype and which of its dimensions are full; the others are 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskCase {
    /// Bool, or a float: additive.
    pub dtype: DType,
    /// Whether batch, heads, q_len and kv_len are full.
    pub full: [bool; 4],
    /// Its rank; leading dimensions beyond it are not full.
    pub rank: usize,
    /// Whether the additive mask is one of finite numbers and the dtype's lowest, without `−inf`.
    pub lowest: bool,
}

/// Indices into the stride zoo, modulo its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Places {
    /// Of q.
    pub q: usize,
    /// Of k.
    pub k: usize,
    /// Of v.
    pub v: usize,
    /// Of the mask.
    pub mask: usize,
    /// Of the sinks and slopes.
    pub vectors: usize,
    /// Of out, in the zoo of outputs.
    pub out: usize,
    /// Of lse, in the zoo of outputs.
    pub lse: usize,
}

/// One problem.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// The seed of its data.
    pub seed: u64,
    /// The dtype of q, k and v.
    pub dtype: DType,
    /// The dtype of out, if it is another.
    pub out_dtype: Option<DType>,
    /// `[batch, num_q_heads, q_len, head_dim]`.
    pub q: [usize; 4],
    /// Heads of k and v.
    pub num_kv_heads: usize,
    /// Keys.
    pub kv_len: usize,
    /// The size of a value.
    pub head_dim_v: usize,
    /// The factor of `q·k`.
    pub softmax_scale: Option<f64>,
    /// Softcap.
    pub softcap: Option<f64>,
    /// Causal masking.
    pub causal: Option<Causal>,
    /// The sliding window.
    pub window: Window,
    /// The mask.
    pub mask: Option<MaskCase>,
    /// The dtype of the sinks.
    pub sinks: Option<DType>,
    /// The dtype of the slopes.
    pub alibi_slopes: Option<DType>,
    /// Whether lse is asked.
    pub lse: bool,
    /// How scores run.
    pub data: Data,
    /// NaN and infinities in keys and values that nobody attends, and NaN in one query.
    pub poison: bool,
    /// Dimensions of q, k, v and out.
    pub rank: usize,
    /// Their order.
    pub layout: TensorLayout,
    /// Strides.
    pub places: Places,
    /// What surrounds the tensors.
    pub guard: Guard,
    /// Of those of q, k and v that are codes: how. Then `dtype` is that of the others.
    pub codes: Qkv<Option<CodesCase>>,
    /// What products are formed of.
    pub compute: Compute,
    /// The probability of dropout, and which weights are dropped; (0, _) is none.
    pub dropout: (f64, DropoutSeed),
}

/// Lengths at which kernels break.
const EDGES: [usize; 26] =
    [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 23, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 130];

fn length(rng: &mut Rng) -> usize {
    match rng.below(20) {
        0 => 0,
        1..=6 => rng.below(131),
        _ => rng.pick(&EDGES),
    }
}

fn dim(rng: &mut Rng) -> usize {
    match rng.below(12) {
        0 => 256,
        1..=5 => rng.pick(&[1, 8, 16, 32, 40, 64, 80, 96, 128]),
        _ => 1 + rng.below(130),
    }
}

impl Case {
    /// Plain attention of contiguous tensors with lse.
    #[must_use]
    pub fn plain(dtype: DType, q: [usize; 4], kv_len: usize) -> Self {
        Case {
            seed: 1,
            dtype,
            out_dtype: None,
            q,
            num_kv_heads: q[1],
            kv_len,
            head_dim_v: q[3],
            softmax_scale: None,
            softcap: None,
            causal: None,
            window: Window::default(),
            mask: None,
            sinks: None,
            alibi_slopes: None,
            lse: true,
            data: Data::Normal,
            poison: false,
            rank: 4,
            layout: TensorLayout::Bhsd,
            places: Places::default(),
            guard: Guard::Heap { shift: 0 },
            codes: Qkv::default(),
            compute: Compute::Exact,
            dropout: (0.0, DropoutSeed::default()),
        }
    }

    /// The random case of this seed: of at most about `max_work` multiplications.
    #[must_use]
    pub fn random(seed: u64, dtypes: &[DType], max_work: usize) -> Self {
        let mut rng = Rng::new(seed);
        let dtype = rng.pick(dtypes);
        let rank = rng.pick(&[4, 4, 4, 3, 2]);
        let group = rng.pick(&[1, 1, 2, 3, 4, 8]);
        let (batch, num_kv_heads, group) = match rank {
            4 => (1 + rng.below(3), 1 + rng.below(3), group),
            3 => (1, 1 + rng.below(3), group),
            _ => (1, 1, 1),
        };
        let (mut q_len, mut kv_len) = (if rng.once_in(5) { 1 } else { length(&mut rng) }, length(&mut rng));
        if rng.once_in(6) {
            kv_len = q_len;
        }
        let mut head_dim = dim(&mut rng);
        let head_dim_v = if rng.once_in(3) { dim(&mut rng) } else { head_dim };
        let work = |q_len: usize, kv_len: usize, head_dim: usize| {
            batch * num_kv_heads * group * q_len * kv_len * (head_dim + head_dim_v)
        };
        while work(q_len, kv_len, head_dim) > max_work {
            match rng.below(3) {
                0 => q_len = q_len.div_ceil(2),
                1 => kv_len = kv_len.div_ceil(2),
                _ => head_dim = head_dim.div_ceil(2),
            }
            if (q_len, kv_len, head_dim) == (1, 1, 1) {
                break;
            }
        }
        let floats: Vec<DType> = COMPUTED.iter().copied().filter(|d| d.bits() <= dtype.accumulation().bits()).collect();
        let mask = (!rng.once_in(3)).then(|| {
            let mask_rank = 1 + rng.below(4);
            let mut full = [true; 4].map(|_| !rng.once_in(3));
            full[..4 - mask_rank].fill(false);
            let dtype = if rng.once_in(2) { DType::Bool } else { rng.pick(&floats) };
            MaskCase { dtype, full, rank: mask_rank, lowest: rng.once_in(4) }
        });
        let data =
            rng.pick(&[Data::Normal, Data::Normal, Data::Normal, Data::Rising, Data::Spike, Data::Equal, Data::Huge]);
        let window_end =
            |rng: &mut Rng| rng.once_in(2).then(|| if rng.once_in(9) { usize::MAX } else { rng.below(40) });
        let windowed = rng.once_in(4);
        Case {
            seed,
            dtype,
            out_dtype: rng.once_in(8).then(|| rng.pick(&floats)),
            q: [batch, num_kv_heads * group, q_len, head_dim],
            num_kv_heads,
            kv_len,
            head_dim_v,
            softmax_scale: rng.once_in(4).then(|| rng.pick(&[0.0, -0.3, 0.11, 1.0, -1.0])),
            softcap: rng.once_in(5).then(|| rng.pick(&[0.5, 2.0, 30.0])),
            causal: rng.pick(&[None, None, Some(Causal::TopLeft), Some(Causal::BottomRight)]),
            window: if windowed {
                Window { left: window_end(&mut rng), right: window_end(&mut rng) }
            } else {
                Window::default()
            },
            mask,
            sinks: rng.once_in(5).then(|| rng.pick(&floats)),
            alibi_slopes: rng.once_in(5).then(|| rng.pick(&floats)),
            lse: !rng.once_in(3),
            data,
            poison: rng.once_in(3),
            rank,
            layout: rng.pick(&[TensorLayout::Bhsd, TensorLayout::Bhsd, TensorLayout::Bshd]),
            places: Case::random_places(&mut rng),
            guard: match rng.below(6) {
                0 => Guard::FrontPage,
                1 => Guard::BackPage,
                _ => Guard::Heap { shift: rng.below(64) },
            },
            codes: Qkv::default(),
            compute: Compute::Exact,
            dropout: (0.0, DropoutSeed::default()),
        }
    }

    /// The random case of this seed with dropout.
    #[must_use]
    pub fn random_dropout(seed: u64, dtypes: &[DType], max_work: usize) -> Self {
        let case = Case::random(seed, dtypes, max_work);
        let mut rng = Rng::new(seed ^ 0xd409);
        let p = rng.pick(&[0.1, 0.1, 0.5, 0.9, 1e-9, 1.0]);
        let first_batch = rng.pick(&[0, 7, u32::MAX - 9]);
        Case { dropout: (p, DropoutSeed { first_batch, ..DropoutSeed::new(rng.bits(), rng.bits()) }), ..case }
    }

    /// The random case of this seed with codes for some of q, k and v; of `dtypes` but float64.
    #[must_use]
    pub fn random_quantized(seed: u64, dtypes: &[DType], max_work: usize) -> Self {
        let dtypes: Vec<DType> = dtypes.iter().copied().filter(|dtype| *dtype != DType::F64).collect();
        let case = Case::random(seed, &dtypes, max_work);
        let mut rng = Rng::new(seed ^ 0xc0de);
        let codes = random_codes(&mut rng, [case.q[3], case.q[3], case.head_dim_v]);
        case.with_codes(codes)
    }

    /// This case with these codes: without an operand beside them float32, and with an `out_dtype` where q does not tell it.
    #[must_use]
    pub fn with_codes(self, codes: Qkv<Option<CodesCase>>) -> Self {
        let all = codes.q.is_some() && codes.k.is_some() && codes.v.is_some();
        let dtype = if all { DType::F32 } else { self.dtype };
        let out_dtype = self.out_dtype.or(codes.q.map(|_| dtype));
        Case { codes, dtype, out_dtype, ..self }
    }

    /// The random case of this seed with products of int8; of `dtypes` but float64.
    #[must_use]
    pub fn random_int8(seed: u64, dtypes: &[DType], max_work: usize) -> Self {
        let dtypes: Vec<DType> = dtypes.iter().copied().filter(|dtype| *dtype != DType::F64).collect();
        Case::random(seed, &dtypes, max_work).with_int8()
    }

    /// This case with products of int8, by codes of k and v that its seed draws. float64 becomes float32.
    #[must_use]
    pub fn with_int8(self) -> Self {
        let mut rng = Rng::new(self.seed ^ 0x18);
        let codes = Qkv { q: None, k: Some(CodesCase::int8_keys(&mut rng)), v: Some(CodesCase::int8_values(&mut rng)) };
        let narrow = |dtype: DType| if dtype == DType::F64 { DType::F32 } else { dtype };
        let mask = self.mask.map(|mask| MaskCase { dtype: narrow(mask.dtype), ..mask });
        let case = Case {
            dtype: narrow(self.dtype),
            out_dtype: self.out_dtype.map(narrow),
            mask,
            sinks: self.sinks.map(narrow),
            alibi_slopes: self.alibi_slopes.map(narrow),
            ..self
        };
        Case { compute: Compute::Int8, ..case.with_codes(codes) }
    }

    /// The sizes of q, k and v as they are stored.
    #[must_use]
    pub fn stored(&self) -> [[usize; 4]; 3] {
        let of = |codes: &Option<CodesCase>, shape| codes.map_or(shape, |codes| codes.stored(shape));
        [of(&self.codes.q, self.q), of(&self.codes.k, self.k()), of(&self.codes.v, self.v())]
    }

    /// Any strides for the inputs (half of them row-major), any injective ones for the outputs.
    #[must_use]
    pub fn random_places(rng: &mut Rng) -> Places {
        let mut at = || if rng.once_in(2) { 0 } else { rng.below(1 << 16) };
        Places { q: at(), k: at(), v: at(), mask: at(), vectors: at(), out: at(), lse: at() }
    }

    /// The options as an interface takes them.
    #[must_use]
    pub fn options(&self) -> Options {
        Options {
            softmax_scale: self.softmax_scale,
            softcap: self.softcap,
            causal: self.causal,
            window: self.window,
            layout: self.layout,
            out_dtype: self.out_dtype,
            compute: self.compute,
            dropout_p: self.dropout.0,
        }
    }

    /// The shape of k.
    #[must_use]
    pub fn k(&self) -> [usize; 4] {
        [self.q[0], self.num_kv_heads, self.kv_len, self.q[3]]
    }

    /// The shape of v.
    #[must_use]
    pub fn v(&self) -> [usize; 4] {
        [self.q[0], self.num_kv_heads, self.kv_len, self.head_dim_v]
    }

    /// The shape of out.
    #[must_use]
    pub fn out(&self) -> [usize; 4] {
        [self.q[0], self.q[1], self.q[2], self.head_dim_v]
    }

    /// The shape of the mask, leading dimensions of 1 included.
    #[must_use]
    pub fn mask_shape(&self, mask: &MaskCase) -> [usize; 4] {
        let target = [self.q[0], self.q[1], self.q[2], self.kv_len];
        std::array::from_fn(|d| if mask.full[d] { target[d] } else { 1 })
    }

    /// The values of this case, from its seed.
    #[must_use]
    pub fn values(&self) -> Values {
        let mut rng = Rng::new(self.seed ^ 0x5eed);
        let [.., head_dim] = self.q;
        let rounded = |dtype: DType, x: f64| round(dtype, x);
        let count = |shape: [usize; 4]| shape.iter().product::<usize>();
        let mut normal = |n: usize| -> Vec<f64> { (0..n).map(|_| rounded(self.dtype, rng.normal())).collect() };
        let (mut q, mut k, v) = (normal(count(self.q)), normal(count(self.k())), normal(count(self.v())));
        // A direction that all queries share makes a key's score a matter of its length along it.
        let towards = match self.data {
            Data::Rising | Data::Spike | Data::Huge => 1.0,
            Data::Normal | Data::Equal => 0.0,
        };
        let wide = if self.data == Data::Huge { 12.0 } else { 1.0 };
        q.iter_mut().for_each(|x| *x = rounded(self.dtype, *x * wide + towards));
        for (n, row) in k.chunks_mut(head_dim).enumerate() {
            let j = n % self.kv_len;
            let along = match self.data {
                Data::Rising => 3.0 * j as f64 / self.kv_len as f64,
                Data::Spike if j + 1 + self.kv_len / 5 == self.kv_len => 8.0,
                _ => 0.0,
            };
            let flat = if self.data == Data::Equal { 0.0 } else { wide };
            row.iter_mut().for_each(|x| *x = rounded(self.dtype, *x * flat + along));
        }
        let mask = self.mask.as_ref().map(|mask| self.mask_values(mask, &mut rng));
        let mut vector = |dtype: Option<DType>, scale: f64| -> Option<Vec<f64>> {
            dtype.map(|dtype| (0..self.q[1]).map(|_| round(dtype, scale * rng.normal())).collect())
        };
        let sinks = vector(self.sinks, 1.0);
        let alibi_slopes = vector(self.alibi_slopes, 0.1);
        let mut v = v;
        let mut quantized = |codes: Option<CodesCase>, numbers: &mut Vec<f64>, shape| {
            codes.map(|codes| {
                let (bytes, scales) = codes.quantize(numbers, shape, &mut rng);
                *numbers = bytes;
                scales
            })
        };
        let scales = Qkv {
            q: quantized(self.codes.q, &mut q, self.q),
            k: quantized(self.codes.k, &mut k, self.k()),
            v: quantized(self.codes.v, &mut v, self.v()),
        };
        Values { q, k, v, scales, mask, sinks, alibi_slopes }
    }

    fn mask_values(&self, mask: &MaskCase, rng: &mut Rng) -> Vec<f64> {
        let shape = self.mask_shape(mask);
        let keys = shape[3].max(1);
        let mut values = Vec::new();
        for _ in 0..shape[..3].iter().product::<usize>() {
            // Rows that are wholly masked, wholly open, and mixed.
            let open = rng.pick(&[0, 4, 2, 2, 3, 1]);
            values.extend((0..keys.min(shape[3])).map(|_| {
                let attend = rng.below(4) < open;
                match (mask.dtype, attend) {
                    (DType::Bool, attend) => f64::from(u8::from(attend)),
                    (dtype, true) => round(dtype, rng.normal()),
                    (dtype, false) if mask.lowest => lowest(dtype),
                    (_, false) => f64::NEG_INFINITY,
                }
            }));
        }
        values
    }

    /// The placements of q, k, v, mask, vectors, out and lse.
    #[must_use]
    pub fn placements(&self) -> Placements {
        let of = |shape: [usize; 4], at: usize| {
            let mut all = zoo(shape);
            let at = at % all.len();
            all.swap_remove(at)
        };
        let of_output = |shape: [usize; 4], at: usize| {
            let mut all = output_zoo(shape);
            let at = at % all.len();
            all.swap_remove(at)
        };
        let mask = self.mask.as_ref().map_or([1; 4], |mask| self.mask_shape(mask));
        let [q, k, v] = self.stored();
        let scales = |codes: Option<CodesCase>, shape| {
            codes.map(|codes| codes.places.map(|place| of(codes.groups(shape), place)))
        };
        Placements {
            q: of(q, self.places.q),
            k: of(k, self.places.k),
            v: of(v, self.places.v),
            scales: Qkv {
                q: scales(self.codes.q, self.q),
                k: scales(self.codes.k, self.k()),
                v: scales(self.codes.v, self.v()),
            },
            mask: of(mask, self.places.mask),
            vectors: of([1, 1, 1, self.q[1]], self.places.vectors),
            out: of_output(self.out(), self.places.out),
            lse: of_output([1, self.q[0], self.q[1], self.q[2]], self.places.lse),
        }
    }
}

/// Where the tensors of a case lie.
#[derive(Clone, Debug)]
pub struct Placements {
    /// Of q.
    pub q: Placement,
    /// Of k.
    pub k: Placement,
    /// Of v.
    pub v: Placement,
    /// Of descales and zero points.
    pub scales: Qkv<Option<[Placement; 2]>>,
    /// Of the mask.
    pub mask: Placement,
    /// Of sinks and slopes.
    pub vectors: Placement,
    /// Of out.
    pub out: Placement,
    /// Of lse, a dimension of 1 first.
    pub lse: Placement,
}

/// The values of a case, row-major in canonical order.
#[derive(Clone, Debug)]
pub struct Values {
    /// Queries.
    pub q: Vec<f64>,
    /// Keys.
    pub k: Vec<f64>,
    /// Values.
    pub v: Vec<f64>,
    /// What makes numbers of those that are codes, which are bytes then.
    pub scales: Qkv<Option<ScaleValues>>,
    /// The mask, not broadcast.
    pub mask: Option<Vec<f64>>,
    /// Sinks.
    pub sinks: Option<Vec<f64>>,
    /// ALiBi slopes.
    pub alibi_slopes: Option<Vec<f64>>,
}
