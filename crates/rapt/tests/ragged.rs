//! Sequences of different lengths in one call, and caches: each has the bits of a call alone, whatever lies around it; and what is refused
//! has written nothing.

use rapt::quant::{Given, QuantError, Scheme, quantize};
use rapt::{
    CacheCodes, CacheView, Causal, Engine, Error, Format, Granularity, Kernel, KvCacheTensors, Options, Queue,
    ScaleLayout, Shape, Spec, Tensors, VarlenTensors, View, ViewMut,
};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 24;
const DIM_V: usize = 16;

/// Numbers between −2 and 2, others with each call.
struct Rng(u32);

impl Rng {
    fn new(seed: u32) -> Rng {
        Rng(seed.wrapping_mul(2_654_435_761) | 1)
    }

    fn next(&mut self) -> f32 {
        // Xorshift (Marsaglia, 2003).
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        (self.0 >> 8) as f32 / (1 << 22) as f32 - 2.0
    }
}

fn numbers(rng: &mut Rng, n: usize) -> Vec<f32> {
    (0..n).map(|_| rng.next()).collect()
}

fn engine() -> Engine {
    Engine::new(Some(2)).unwrap()
}

/// Attention of one sequence alone, `[len, heads, dim]`: out and lse.
fn alone(engine: &Engine, [q, k, v]: [&[f32]; 3], dims: [usize; 2], options: &Options) -> [Vec<f32>; 2] {
    let [dim, dim_v] = dims;
    let (rows, keys) = (q.len() / (HEADS * dim), k.len() / (KV_HEADS * dim));
    let mut out = vec![f32::NAN; rows * HEADS * dim_v];
    let mut lse = vec![f32::NAN; rows * HEADS];
    let tensors = Tensors {
        lse: Some(ViewMut::contiguous("lse", &mut lse, [HEADS, rows].into()).unwrap()),
        ..Tensors::new(
            View::contiguous("q", q, [rows, HEADS, dim].into()).unwrap(),
            View::contiguous("k", k, [keys, KV_HEADS, dim].into()).unwrap(),
            View::contiguous("v", v, [keys, KV_HEADS, dim_v].into()).unwrap(),
            ViewMut::contiguous("out", &mut out, [rows, HEADS, dim_v].into()).unwrap(),
        )
    };
    engine.attention_into(tensors, &Options { layout: rapt::TensorLayout::Bshd, ..*options }).unwrap();
    [out, lse]
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

fn offsets(lengths: &[usize]) -> Vec<i32> {
    let ends = lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end as i32)
    });
    std::iter::once(0).chain(ends).collect()
}

struct Varlen {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    of_q: Vec<i32>,
    of_kv: Vec<i32>,
    out: Vec<f32>,
    lse: Vec<f32>,
}

impl Varlen {
    fn new(q_lens: &[usize], kv_lens: &[usize]) -> Varlen {
        let (rows, keys) = (q_lens.iter().sum::<usize>(), kv_lens.iter().sum::<usize>());
        let rng = &mut Rng::new(3);
        Varlen {
            q: numbers(rng, rows * HEADS * DIM),
            k: numbers(rng, keys * KV_HEADS * DIM),
            v: numbers(rng, keys * KV_HEADS * DIM_V),
            of_q: offsets(q_lens),
            of_kv: offsets(kv_lens),
            out: vec![f32::NAN; rows * HEADS * DIM_V],
            lse: vec![f32::NAN; rows * HEADS],
        }
    }

    fn tensors(&mut self) -> rapt::Result<VarlenTensors<'_>> {
        let Varlen { q, k, v, of_q, of_kv, out, lse } = self;
        let (rows, keys) = (q.len() / (HEADS * DIM), k.len() / (KV_HEADS * DIM));
        Ok(VarlenTensors {
            q: View::contiguous("q", q, [rows, HEADS, DIM].into())?,
            k: View::contiguous("k", k, [keys, KV_HEADS, DIM].into())?,
            v: View::contiguous("v", v, [keys, KV_HEADS, DIM_V].into())?,
            codes: rapt::Qkv::default(),
            cu_seqlens_q: View::contiguous("cu_seqlens_q", of_q, [of_q.len()].into())?,
            cu_seqlens_kv: View::contiguous("cu_seqlens_kv", of_kv, [of_kv.len()].into())?,
            sinks: None,
            alibi_slopes: None,
            dropout: None,
            out: ViewMut::contiguous("out", out, [rows, HEADS, DIM_V].into())?,
            lse: Some(ViewMut::contiguous("lse", lse, [HEADS, rows].into())?),
        })
    }

    fn run(&mut self, engine: &Engine, options: &Options) -> rapt::Result<()> {
        engine.varlen_attention(self.tensors()?, options, &Queue::Host(engine.executor()))
    }
}

#[test]
fn each_sequence_has_the_bits_of_a_call_alone() {
    let (engine, q_lens, kv_lens) = (engine(), [1, 300, 0, 3, 700, 2], [900, 40, 7, 0, 650, 1]);
    let causal = |causal| Options { causal: Some(causal), ..Options::default() };
    for options in [Options::default(), causal(Causal::TopLeft), causal(Causal::BottomRight).with_window(Some(5), None)]
    {
        let mut all = Varlen::new(&q_lens, &kv_lens);
        all.run(&engine, &options).unwrap();
        let total: usize = q_lens.iter().sum();
        for n in 0..q_lens.len() {
            let part = |of: &[i32]| of[n] as usize..of[n + 1] as usize;
            let (rows, keys) = (part(&all.of_q), part(&all.of_kv));
            let q = &all.q[rows.start * HEADS * DIM..rows.end * HEADS * DIM];
            let k = &all.k[keys.start * KV_HEADS * DIM..keys.end * KV_HEADS * DIM];
            let v = &all.v[keys.start * KV_HEADS * DIM_V..keys.end * KV_HEADS * DIM_V];
            let [out, lse] = alone(&engine, [q, k, v], [DIM, DIM_V], &options);
            assert_eq!(bits(&all.out[rows.start * HEADS * DIM_V..rows.end * HEADS * DIM_V]), bits(&out), "{n}");
            let of_heads = (0..HEADS).flat_map(|head| all.lse[head * total..][rows.clone()].to_vec());
            assert_eq!(bits(&of_heads.collect::<Vec<_>>()), bits(&lse), "{n}");
        }
    }
}

#[test]
fn what_would_run_names_the_kernel_of_each_sequence() {
    let (engine, q_lens, kv_lens) = (engine(), [1, 300, 0, 3, 700, 2], [900, 40, 7, 0, 650, 1]);
    let mut all = Varlen::new(&q_lens, &kv_lens);
    let plan = engine.explain_varlen(all.tensors().unwrap(), &Options::default(), 3).unwrap();
    assert!(all.out.iter().chain(&all.lse).all(|x| x.is_nan()), "nothing is written");
    assert_eq!((plan.sequences(), plan.kernels()), (6, vec![Kernel::Decode, Kernel::Forward, Kernel::Empty]));
    for (n, (&q_len, &kv_len)) in q_lens.iter().zip(&kv_lens).enumerate() {
        let mut parts = plan.parts().iter().filter(|part| part.sequences().contains(&n));
        let (part, None) = (parts.next().unwrap(), parts.next()) else { panic!("sequence {n} is in two parts") };
        let view = |name, data, len, heads| View::contiguous(name, data, [len, heads, DIM].into()).unwrap();
        let (q, k) = (&all.q[..q_len * HEADS * DIM], &all.k[..kv_len * KV_HEADS * DIM]);
        let (q, k) = (view("q", q, q_len, HEADS), view("k", k, kv_len, KV_HEADS));
        let options = Options { layout: rapt::TensorLayout::Bshd, ..Options::default() };
        let alone = engine.plan_for(&Spec::builder(&q, &k, &k, &options).build().unwrap(), 3).unwrap();
        assert_eq!((alone.key(), alone.block_n()), (part.plan().key(), part.plan().block_n()), "sequence {n}");
    }
    let forward = plan.parts().iter().find(|part| part.sequences().contains(&4)).unwrap();
    assert_eq!(forward.plan().spec().q_len(), 700, "that with the most work");
    let text = plan.to_string();
    assert!(text.starts_with("sequences        6\n") && text.contains("of 6 sequences: "), "{text}");
    assert!(text.contains("q_len 700, kv_len 650") && !text.contains("q_len 300,"), "{text}");
    // What a call would refuse is refused.
    all.of_q[1] = -1;
    let error = engine.explain_varlen(all.tensors().unwrap(), &Options::default(), 3).unwrap_err();
    assert!(matches!(error, Error::Length { tensor: "cu_seqlens_q", .. }), "{error}");
}

#[test]
fn offsets_that_cannot_be_are_refused_by_their_place() {
    let engine = engine();
    let refused = |bend: fn(&mut Varlen)| {
        let mut all = Varlen::new(&[2, 3], &[4, 5]);
        bend(&mut all);
        let error = all.run(&engine, &Options::default()).unwrap_err();
        assert!(all.out.iter().chain(&all.lse).all(|x| x.is_nan()), "nothing is written");
        error
    };
    let at = |error: &Error| match error {
        Error::Length { tensor, at, got, .. } => (*tensor, *at, *got),
        other => panic!("{other}"),
    };
    assert_eq!(at(&refused(|all| all.of_q[0] = -1)), ("cu_seqlens_q", 0, -1));
    assert_eq!(at(&refused(|all| all.of_q[1] = -2)), ("cu_seqlens_q", 1, -2));
    assert_eq!(at(&refused(|all| all.of_q[2] = 1)), ("cu_seqlens_q", 2, 1));
    assert_eq!(at(&refused(|all| all.of_kv[2] = 3)), ("cu_seqlens_kv", 2, 3));
    assert_eq!(at(&refused(|all| all.of_kv[2] = 10)), ("cu_seqlens_kv", 2, 10));
    assert!(matches!(refused(|all| all.of_kv = vec![0, 4, 9, 9]), Error::SizeMismatch { size: "sequences", .. }));
    assert!(matches!(refused(|all| all.of_kv = vec![]), Error::Option { option: "cu_seqlens_kv", .. }));
}

/// A cache in pages of `page_size` or in one tensor, for sequences of these lengths.
struct Cache {
    page_size: Option<usize>,
    /// `[blocks, rows, heads, dim]`.
    shape: [usize; 2],
    k: Vec<f32>,
    v: Vec<f32>,
    table: Vec<i32>,
    entries: usize,
    lengths: Vec<i32>,
}

const ROOM: usize = 48;

impl Cache {
    fn new(page_size: Option<usize>, lengths: &[i32]) -> Cache {
        let batch = lengths.len();
        let entries = page_size.map_or(0, |size| ROOM / size);
        let blocks = page_size.map_or(batch, |_| batch * entries + 3);
        let rows = page_size.unwrap_or(ROOM);
        // Pages in no order: multiples of a prime that does not divide their count.
        let step = [5, 7, 11].into_iter().find(|step| !blocks.is_multiple_of(*step)).unwrap();
        let table = (0..batch * entries).map(|n| (n * step % blocks) as i32).collect();
        let room = blocks * rows * KV_HEADS;
        // What holds no key is NaN.
        let (k, v) = (vec![f32::NAN; room * DIM], vec![f32::NAN; room * DIM_V]);
        Cache { page_size, shape: [blocks, rows], k, v, table, entries, lengths: lengths.to_vec() }
    }

    /// Where key `j` of sequence `b` lies, in rows.
    fn row(&self, b: usize, j: usize) -> usize {
        let rows = self.shape[1];
        match self.page_size {
            None => b * rows + j,
            Some(_) => self.table[b * self.entries + j / rows] as usize * rows + j % rows,
        }
    }

    fn set(&mut self, b: usize, j: usize, k: &[f32], v: &[f32]) {
        let row = self.row(b, j);
        self.k[row * KV_HEADS * DIM..][..KV_HEADS * DIM].copy_from_slice(k);
        self.v[row * KV_HEADS * DIM_V..][..KV_HEADS * DIM_V].copy_from_slice(v);
    }

    /// The first `n` keys and values of sequence `b`, one after another.
    fn keys(&self, b: usize, n: usize) -> [Vec<f32>; 2] {
        let of = |from: &[f32], len: usize| (0..n).flat_map(|j| from[self.row(b, j) * len..][..len].to_vec()).collect();
        [of(&self.k, KV_HEADS * DIM), of(&self.v, KV_HEADS * DIM_V)]
    }
}

/// Attention of `q` to a cache, after `new` keys were appended; out and lse.
fn attend(
    engine: &Engine,
    cache: &mut Cache,
    q: &[f32],
    new: Option<[&[f32]; 2]>,
    options: &Options,
) -> Result<[Vec<f32>; 2], QuantError> {
    let batch = cache.lengths.len();
    let q_len = q.len() / (batch * HEADS * DIM);
    let (mut out, mut lse) = (vec![f32::NAN; batch * q_len * HEADS * DIM_V], vec![f32::NAN; batch * q_len * HEADS]);
    let Cache { shape: [blocks, rows], page_size, .. } = *cache;
    let appended = new.map_or(0, |[k, _]| k.len() / (batch * KV_HEADS * DIM));
    let tensors = KvCacheTensors {
        q: View::contiguous("q", q, [batch, q_len, HEADS, DIM].into())?,
        k_cache: CacheView::Write(ViewMut::contiguous("k_cache", &mut cache.k, [blocks, rows, KV_HEADS, DIM].into())?),
        v_cache: CacheView::Write(ViewMut::contiguous(
            "v_cache",
            &mut cache.v,
            [blocks, rows, KV_HEADS, DIM_V].into(),
        )?),
        k_codes: None,
        v_codes: None,
        k: new.map(|[k, _]| View::contiguous("k", k, [batch, appended, KV_HEADS, DIM].into())).transpose()?,
        v: new.map(|[_, v]| View::contiguous("v", v, [batch, appended, KV_HEADS, DIM_V].into())).transpose()?,
        cache_seqlens: Some(View::contiguous("cache_seqlens", &cache.lengths, [batch].into())?),
        page_table: page_size
            .map(|_| View::contiguous("page_table", &cache.table, [batch, cache.entries].into()))
            .transpose()?,
        sinks: None,
        alibi_slopes: None,
        out: ViewMut::contiguous("out", &mut out, [batch, q_len, HEADS, DIM_V].into())?,
        lse: Some(ViewMut::contiguous("lse", &mut lse, [batch, HEADS, q_len].into())?),
    };
    let done = engine.attention_with_kvcache(tensors, options, &Queue::Host(engine.executor()));
    assert!(done.is_ok() || out.iter().chain(&lse).all(|x| x.is_nan()), "nothing is written");
    done.map(|()| [out, lse])
}

#[test]
fn steps_of_decoding_have_the_bits_of_whole_tensors() {
    let engine = engine();
    let options = Options { causal: Some(Causal::BottomRight), ..Options::default() };
    for page_size in [None, Some(1), Some(4), Some(16), Some(48)] {
        for q_len in [1, 3, 16] {
            let rng = &mut Rng::new(q_len as u32);
            let mut cache = Cache::new(page_size, &[0, 5, 17]);
            for b in 0..3 {
                for j in 0..cache.lengths[b] as usize {
                    let (k, v) = (numbers(rng, KV_HEADS * DIM), numbers(rng, KV_HEADS * DIM_V));
                    cache.set(b, j, &k, &v);
                }
            }
            for _ in 0..(ROOM - 17) / q_len {
                let q = numbers(rng, 3 * q_len * HEADS * DIM);
                let (k, v) = (numbers(rng, 3 * q_len * KV_HEADS * DIM), numbers(rng, 3 * q_len * KV_HEADS * DIM_V));
                let [out, lse] = attend(&engine, &mut cache, &q, Some([&k, &v]), &options).unwrap();
                for b in 0..3 {
                    let at = cache.lengths[b] as usize;
                    let n = at + q_len;
                    let [all_k, all_v] = cache.keys(b, n);
                    let (rows, cols) = (q_len * KV_HEADS * DIM, q_len * KV_HEADS * DIM_V);
                    assert_eq!(
                        all_k[at * KV_HEADS * DIM..],
                        k[b * rows..][..rows],
                        "the new keys lie behind the others"
                    );
                    assert_eq!(all_v[at * KV_HEADS * DIM_V..], v[b * cols..][..cols]);
                    let of_q = &q[b * q_len * HEADS * DIM..][..q_len * HEADS * DIM];
                    let [one, one_lse] = alone(&engine, [of_q, &all_k, &all_v], [DIM, DIM_V], &options);
                    assert_eq!(bits(&out[b * one.len()..][..one.len()]), bits(&one), "{page_size:?} {q_len} {n}");
                    assert_eq!(bits(&lse[b * one_lse.len()..][..one_lse.len()]), bits(&one_lse));
                    cache.lengths[b] = n as i32;
                }
            }
        }
    }
}

#[test]
fn what_a_cache_cannot_hold_or_share_is_refused_and_nothing_is_written() {
    let engine = engine();
    let refused = |page_size, new: usize, bend: fn(&mut Cache)| {
        let mut cache = Cache::new(page_size, &[5, 9]);
        bend(&mut cache);
        let (k, v) = (vec![1f32; 2 * new * KV_HEADS * DIM], vec![1f32; 2 * new * KV_HEADS * DIM_V]);
        let q = vec![1f32; 2 * HEADS * DIM];
        let error = attend(&engine, &mut cache, &q, Some([&k, &v]), &Options::default()).unwrap_err();
        assert!(cache.k.iter().chain(&cache.v).all(|x| x.is_nan()), "no key is written");
        match error {
            QuantError::Core(error) => error,
            other => panic!("{other}"),
        }
    };
    for page_size in [None, Some(4)] {
        for (bend, got) in
            [(|cache: &mut Cache| cache.lengths[1] = 47) as fn(&mut Cache), |cache| cache.lengths[1] = -1]
                .into_iter()
                .zip([47, -1])
        {
            let error = refused(page_size, 2, bend);
            assert!(
                matches!(error, Error::Length { tensor: "cache_seqlens", at: 1, got: it, .. } if it == got),
                "{error}"
            );
        }
        assert!(matches!(refused(page_size, 49, |_| {}), Error::SizeMismatch { tensor: "k", .. }));
    }
    // Sequence 0 writes key 5 into its second page, sequence 1 key 9 into its third.
    let error = refused(Some(4), 1, |cache| cache.table[1] = 999);
    assert_eq!(error, Error::PageIndex { at: 1, page: 999, num_pages: 27 });
    let error = refused(Some(4), 1, |cache| cache.table[cache.entries] = cache.table[1]);
    assert!(matches!(error, Error::PageShared { writer: 0, other: 1, .. }), "{error}");
    let error = refused(Some(4), 1, |cache| cache.table[0] = cache.table[1]);
    assert!(matches!(error, Error::PageShared { writer: 0, other: 0, .. }), "{error}");
    // Pages that are only read may be shared, and what lies behind a sequence's pages is not looked at.
    let mut cache = Cache::new(Some(4), &[5, 9]);
    cache.table[cache.entries] = cache.table[0];
    (cache.table[2], cache.table[cache.entries + 3]) = (-5, 999);
    let new = [vec![1f32; 2 * KV_HEADS * DIM], vec![1f32; 2 * KV_HEADS * DIM_V]];
    attend(&engine, &mut cache, &vec![1f32; 2 * HEADS * DIM], Some([&new[0], &new[1]]), &Options::default()).unwrap();
}

#[test]
fn positions_count_from_the_last_key() {
    let engine = engine();
    let rng = &mut Rng::new(8);
    let mut cache = Cache::new(Some(16), &[20, 33]);
    for (b, n) in [(0, 20), (1, 33)] {
        for j in 0..n {
            cache.set(b, j, &numbers(rng, KV_HEADS * DIM), &numbers(rng, KV_HEADS * DIM_V));
        }
    }
    let window = Options::default().with_window(Some(6), None);
    let q = numbers(rng, 2 * HEADS * DIM);
    let [out, _] = attend(&engine, &mut cache, &q, None, &window).unwrap();
    for (b, n) in [(0, 20), (1, 33)] {
        let [k, v] = cache.keys(b, n);
        let last = |of: &[f32], len: usize| of[of.len() - 7 * len..].to_vec();
        let (k, v) = (last(&k, KV_HEADS * DIM), last(&v, KV_HEADS * DIM_V));
        let [one, _] =
            alone(&engine, [&q[b * HEADS * DIM..][..HEADS * DIM], &k, &v], [DIM, DIM_V], &Options::default());
        let worst = out[b * one.len()..].iter().zip(&one).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-5, "{worst}");
    }
    let q = numbers(rng, 2 * 3 * HEADS * DIM);
    let error = attend(&engine, &mut cache, &q, None, &window).unwrap_err();
    assert!(matches!(error, QuantError::Core(Error::Unsupported { .. })), "{error}");
    let top_left = Options { causal: Some(Causal::TopLeft), ..Options::default() };
    let error = attend(&engine, &mut cache, &q, None, &top_left).unwrap_err();
    assert!(matches!(error, QuantError::Core(Error::Option { option: "causal", .. })), "{error}");
}

const N: usize = 21;
const PAGE: usize = 8;
const TABLE: [i32; 3] = [2, 0, 1];

/// A cache of codes in three pages, of one sequence.
struct Coded {
    format: Format,
    granularity: Granularity,
    codes: Vec<u8>,
    /// Of each key or block of one, by the size of their dtype; one for the tensor.
    f32_scales: Vec<f32>,
    byte_scales: Vec<u8>,
    points: Vec<u8>,
}

impl Coded {
    fn new(format: Format, granularity: Granularity) -> Coded {
        let scales = if granularity == Granularity::Tensor { 1 } else { 3 * PAGE * KV_HEADS * per_head(granularity) };
        Coded {
            format,
            granularity,
            codes: vec![0x55; 3 * PAGE * KV_HEADS * DIM.div_ceil(format.codes_per_byte())],
            f32_scales: vec![0.03; scales],
            byte_scales: vec![99; scales],
            points: vec![9; scales],
        }
    }

    fn scale_shape(&self) -> Shape {
        let whole = [3, PAGE, KV_HEADS, per_head(self.granularity)];
        let rank = match self.granularity {
            Granularity::Tensor => 0,
            Granularity::Token => 3,
            _ => 4,
        };
        Shape::new(&whole[..rank]).unwrap()
    }

    /// Appends `keys` behind the first `length`, and attends to them with values that are all one half.
    fn append(&mut self, engine: &Engine, length: usize, keys: &[f32]) -> Result<Vec<f32>, QuantError> {
        let (shape, stored, format) = (self.scale_shape(), self.format.scale_dtype(), self.format);
        let (q, halves, lengths) = ([1f32; HEADS * DIM], [0.5f32; 3 * PAGE * KV_HEADS * DIM], [length as i32]);
        let (mut out, new) = (vec![f32::NAN; HEADS * DIM], keys.len() / (KV_HEADS * DIM));
        let mut bytes = ViewMut::contiguous(
            "k_cache",
            &mut self.codes,
            [3, PAGE, KV_HEADS, DIM.div_ceil(format.codes_per_byte())].into(),
        )?;
        let mut byte_scales = ViewMut::contiguous("k_descale", &mut self.byte_scales, shape)?;
        let descale = if stored == rapt::DType::F32 {
            CacheView::Write(ViewMut::contiguous("k_descale", &mut self.f32_scales, shape)?)
        } else {
            CacheView::Write(byte_scales.reinterpreted("k_descale", stored)?)
        };
        let points = ViewMut::contiguous("k_zero_point", &mut self.points, shape)?;
        let zero_point = format.has_zero_point().then_some(CacheView::Write(points));
        let granularity = matches!(self.granularity, Granularity::Block(_)).then_some(self.granularity);
        let codes = CacheCodes { format, descale, zero_point, global_scale: None, granularity, head_dim: Some(DIM) };
        let tensors = KvCacheTensors {
            q: View::contiguous("q", &q, [1, 1, HEADS, DIM].into())?,
            k_cache: CacheView::Write(bytes.reinterpreted("k_cache", format.code_dtype())?),
            v_cache: CacheView::Read(View::contiguous("v_cache", &halves, [3, PAGE, KV_HEADS, DIM].into())?),
            k_codes: Some(codes),
            v_codes: None,
            k: Some(View::contiguous("k", keys, [1, new, KV_HEADS, DIM].into())?),
            v: None,
            cache_seqlens: Some(View::contiguous("cache_seqlens", &lengths, [1].into())?),
            page_table: Some(View::contiguous("page_table", &TABLE, [1, 3].into())?),
            sinks: None,
            alibi_slopes: None,
            out: ViewMut::contiguous("out", &mut out, [1, 1, HEADS, DIM].into())?,
            lse: None,
        };
        engine.attention_with_kvcache(tensors, &Options::default(), &Queue::Host(engine.executor()))?;
        Ok(out)
    }
}

/// Factors of one head of a key.
fn per_head(granularity: Granularity) -> usize {
    if let Granularity::Block(size) = granularity { DIM.div_ceil(size) } else { 1 }
}

#[test]
fn keys_are_appended_as_codes_without_touching_old_ones() {
    let engine = engine();
    for (format, granularity) in [
        (Format::Int8, Granularity::Token),
        (Format::Int8, Granularity::Tensor),
        (Format::Uint8, Granularity::Token),
        (Format::Int4, Granularity::Block(8)),
        (Format::E4m3fn, Granularity::Block(4)),
        (Format::Mxfp8, Granularity::Block(32)),
        (Format::Mxfp4, Granularity::Block(32)),
    ] {
        let what = format!("{format} by {granularity}");
        let scheme = Scheme::new(format, Some(granularity), ScaleLayout::Plain).unwrap();
        let keys = numbers(&mut Rng::new(5), N * KV_HEADS * DIM);
        let whole = View::contiguous("k", &keys, [1, N, KV_HEADS, DIM].into()).unwrap();
        let mut cache = Coded::new(format, granularity);
        let fixed = [0.03f32];
        let scale = View::contiguous("scale", &fixed, Shape::new(&[]).unwrap()).unwrap();
        let given = (granularity == Granularity::Tensor).then_some(Given { scale, zero_point: None });
        let at_once = quantize(&whole, scheme, given.as_ref()).unwrap();
        for n in 0..N {
            let out = cache.append(&engine, n, &keys[n * KV_HEADS * DIM..][..KV_HEADS * DIM]).unwrap();
            assert!(out.iter().all(|x| (x - 0.5).abs() < 1e-6), "{what}: {out:?}");
        }
        let row = |j: usize| TABLE[j / PAGE] as usize * PAGE + j % PAGE;
        let (code_len, scale_len) =
            (KV_HEADS * DIM.div_ceil(format.codes_per_byte()), KV_HEADS * per_head(granularity));
        for j in 0..N {
            assert_eq!(
                cache.codes[row(j) * code_len..][..code_len],
                at_once.codes()[j * code_len..][..code_len],
                "{what}: {j}"
            );
            if granularity == Granularity::Tensor {
                continue;
            }
            let (stored, made) = (row(j) * scale_len, j * scale_len);
            if let Some(scales) = at_once.scale_f32() {
                assert_eq!(cache.f32_scales[stored..][..scale_len], scales[made..][..scale_len], "{what}: {j}");
            } else if let Some(scales) = at_once.scale_bytes() {
                assert_eq!(cache.byte_scales[stored..][..scale_len], scales[made..][..scale_len], "{what}: {j}");
            }
            if let Some(points) = at_once.zero_point() {
                assert_eq!(cache.points[stored..][..scale_len], points[made..][..scale_len], "{what}: {j}");
            }
        }
        let behind = row(N - 1) + 1..(TABLE[2] as usize + 1) * PAGE;
        let rest = &cache.codes[behind.start * code_len..behind.end * code_len];
        assert!(!rest.is_empty() && rest.iter().all(|&x| x == 0x55), "{what}: what lies behind the last key");
    }
}

#[test]
fn a_number_without_a_code_is_refused_before_anything_is_written() {
    let engine = engine();
    let mut cache = Coded::new(Format::Int8, Granularity::Token);
    let error = cache.append(&engine, 0, &[f32::NAN; KV_HEADS * DIM]).unwrap_err();
    assert!(matches!(error, QuantError::NoCode { .. }), "{error}");
    assert!(cache.codes.iter().all(|&x| x == 0x55) && cache.f32_scales.iter().all(|&x| x == 0.03));
    let mut cache = Coded::new(Format::E4m3fn, Granularity::Token);
    cache.append(&engine, 0, &[f32::NAN; KV_HEADS * DIM]).unwrap();
}
