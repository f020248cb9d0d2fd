//! Codes of sequences that lie one after another, and products of int8 there and in caches: each sequence has the bits of a call alone,
//! and what is refused has written nothing.

use rapt::quant::{Quantized, Scheme, quantize};
use rapt::{
    CacheCodes, CacheView, Causal, Codes, Compute, DType, Engine, Error, Format, Granularity, KvCacheTensors, Options,
    Qkv, Queue, ScaleLayout, Shape, TensorLayout, Tensors, VarlenTensors, View, ViewMut,
};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 24;
const DIM_V: usize = 16;
const Q_LENS: [usize; 6] = [1, 40, 0, 3, 70, 2];
const KV_LENS: [usize; 6] = [90, 40, 7, 0, 265, 1];

/// Numbers between −2 and 2.
fn numbers(seed: u32, n: usize) -> Vec<f32> {
    let mut x = seed.wrapping_mul(2_654_435_761) | 1;
    let next = || {
        // Xorshift (Marsaglia, 2003).
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        (x >> 8) as f32 / (1 << 22) as f32 - 2.0
    };
    std::iter::repeat_with(next).take(n).collect()
}

fn engine() -> Engine {
    Engine::new(Some(2)).unwrap()
}

fn total(lengths: &[usize]) -> usize {
    lengths.iter().sum()
}

fn offsets(lengths: &[usize]) -> Vec<i32> {
    let ends = lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end as i32)
    });
    std::iter::once(0).chain(ends).collect()
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

/// An operand that is codes: quantized, or with factors of a shape of their own in place of those.
struct Coded {
    quantized: Quantized,
    factors: Option<(Vec<f32>, Shape)>,
    dim: usize,
}

impl Coded {
    fn new(seed: u32, [rows, heads, dim]: [usize; 3], format: Format, granularity: Option<Granularity>) -> Coded {
        let x = numbers(seed, rows * heads * dim);
        let view = View::contiguous("x", &x, [rows, heads, dim].into()).unwrap();
        let scheme = Scheme::new(format, granularity, ScaleLayout::Plain).unwrap();
        Coded { quantized: quantize(&view, scheme, None).unwrap(), factors: None, dim }
    }

    /// int8 with factors of this shape, of either sign.
    fn int8(seed: u32, shape: [usize; 3], factors: &[usize]) -> Coded {
        let of = numbers(seed + 1, factors.iter().product::<usize>().max(1)).iter().map(|x| x / 64.0).collect();
        let factors = Some((of, Shape::new(factors).unwrap()));
        Coded { factors, ..Coded::new(seed, shape, Format::Int8, Some(Granularity::Tensor)) }
    }

    fn tensor(&self) -> View<'_> {
        self.quantized.parts().unwrap().codes
    }

    fn codes(&self) -> Codes<'_> {
        let (parts, format) = (self.quantized.parts().unwrap(), self.quantized.form().format());
        if let Some((factors, shape)) = &self.factors {
            let descale = View::contiguous("descale", factors, *shape).unwrap();
            return Codes { head_dim: Some(self.dim), ..Codes::new(format, descale) };
        }
        Codes {
            zero_point: parts.zero_point,
            global_scale: parts.global_scale,
            granularity: Some(self.quantized.form().scheme().granularity()),
            head_dim: Some(self.dim),
            ..Codes::new(format, parts.scale.unwrap())
        }
    }

    /// Those of `rows`, whose factors they share or have.
    fn cut(&self, rows: std::ops::Range<usize>) -> (View<'_>, Codes<'_>) {
        let codes = self.codes();
        let has_rows = codes.descale.shape().first() == self.tensor().shape().first();
        let descale = if has_rows { codes.descale.narrow(0, &rows) } else { codes.descale };
        let zero_point = codes.zero_point.map(|points| if has_rows { points.narrow(0, &rows) } else { points });
        (self.tensor().narrow(0, &rows), Codes { descale, zero_point, ..codes })
    }
}

fn boxed<'a>(k: Codes<'a>, v: Codes<'a>) -> Qkv<Option<Box<Codes<'a>>>> {
    Qkv { q: None, k: Some(Box::new(k)), v: Some(Box::new(v)) }
}

/// Attention of all sequences: out and lse.
fn varlen(engine: &Engine, [k, v]: [&Coded; 2], options: &Options) -> rapt::Result<[Vec<f32>; 2]> {
    let (rows, of_q, of_kv) = (total(&Q_LENS), offsets(&Q_LENS), offsets(&KV_LENS));
    let q = numbers(1, rows * HEADS * DIM);
    let (mut out, mut lse) = (vec![f32::NAN; rows * HEADS * DIM_V], vec![f32::NAN; rows * HEADS]);
    let tensors = VarlenTensors {
        q: View::contiguous("q", &q, [rows, HEADS, DIM].into())?,
        k: k.tensor(),
        v: v.tensor(),
        codes: boxed(k.codes(), v.codes()),
        cu_seqlens_q: View::contiguous("cu_seqlens_q", &of_q, [of_q.len()].into())?,
        cu_seqlens_kv: View::contiguous("cu_seqlens_kv", &of_kv, [of_kv.len()].into())?,
        sinks: None,
        alibi_slopes: None,
        dropout: None,
        out: ViewMut::contiguous("out", &mut out, [rows, HEADS, DIM_V].into())?,
        lse: Some(ViewMut::contiguous("lse", &mut lse, [HEADS, rows].into())?),
    };
    let done = engine.varlen_attention(tensors, options, &Queue::Host(engine.executor()));
    assert!(done.is_ok() || out.iter().chain(&lse).all(|x| x.is_nan()), "nothing is written");
    done.map(|()| [out, lse])
}

/// Attention of one sequence alone, `[len, heads, dim]`: out and lse.
fn alone<'a>(
    engine: &Engine,
    q: &'a [f32],
    [(k, of_k), (v, of_v)]: [(View<'a>, Codes<'a>); 2],
    options: &Options,
) -> [Vec<f32>; 2] {
    let rows = q.len() / (HEADS * DIM);
    let (mut out, mut lse) = (vec![f32::NAN; rows * HEADS * DIM_V], vec![f32::NAN; rows * HEADS]);
    let q = View::contiguous("q", q, [rows, HEADS, DIM].into()).unwrap();
    let tensors = Tensors {
        codes: boxed(of_k, of_v),
        lse: Some(ViewMut::contiguous("lse", &mut lse, [HEADS, rows].into()).unwrap()),
        ..Tensors::new(q, k, v, ViewMut::contiguous("out", &mut out, [rows, HEADS, DIM_V].into()).unwrap())
    };
    engine.attention_into(tensors, &Options { layout: TensorLayout::Bshd, ..*options }).unwrap();
    [out, lse]
}

fn check(engine: &Engine, what: &str, operands: [&Coded; 2], options: &Options) -> Vec<f32> {
    let [out, lse] = varlen(engine, operands, options).unwrap();
    let (rows, q) = (total(&Q_LENS), numbers(1, total(&Q_LENS) * HEADS * DIM));
    let (of_q, of_kv) = (offsets(&Q_LENS), offsets(&KV_LENS));
    for n in 0..Q_LENS.len() {
        let part = |of: &[i32]| of[n] as usize..of[n + 1] as usize;
        let (queries, keys) = (part(&of_q), part(&of_kv));
        let q = &q[queries.start * HEADS * DIM..queries.end * HEADS * DIM];
        let [one, one_lse] = alone(engine, q, operands.map(|operand| operand.cut(keys.clone())), options);
        assert_eq!(bits(&out[queries.start * HEADS * DIM_V..queries.end * HEADS * DIM_V]), bits(&one), "{what}: {n}");
        let of_heads: Vec<f32> = (0..HEADS).flat_map(|head| lse[head * rows..][queries.clone()].to_vec()).collect();
        assert_eq!(bits(&of_heads), bits(&one_lse), "{what}: {n}");
    }
    out
}

fn shapes() -> [[usize; 3]; 2] {
    let keys = total(&KV_LENS);
    [[keys, KV_HEADS, DIM], [keys, KV_HEADS, DIM_V]]
}

#[test]
fn codes_of_each_sequence_have_the_bits_of_a_call_alone() {
    let (engine, [k_shape, v_shape]) = (engine(), shapes());
    let causal = Options::default().with_causal(Causal::BottomRight);
    for (format, granularity) in [
        (Format::Int8, Some(Granularity::Token)),
        (Format::Int8, Some(Granularity::Tensor)),
        (Format::Int8, Some(Granularity::Block(8))),
        (Format::Uint8, Some(Granularity::Token)),
        (Format::Int4, Some(Granularity::Block(5))),
        (Format::E4m3fn, Some(Granularity::Token)),
        (Format::E5m2, Some(Granularity::Block(4))),
        (Format::Mxfp8, None),
        (Format::Mxfp4, None),
        (Format::Nvfp4, None),
    ] {
        let (k, v) = (Coded::new(2, k_shape, format, granularity), Coded::new(3, v_shape, format, granularity));
        for options in [Options::default(), causal] {
            check(&engine, format.name(), [&k, &v], &options);
        }
    }
    // Factors that all sequences share.
    for (of_k, of_v) in [(vec![KV_HEADS], vec![1, KV_HEADS, DIM_V]), (vec![1, KV_HEADS, DIM], vec![KV_HEADS])] {
        let (k, v) = (Coded::int8(4, k_shape, &of_k), Coded::int8(6, v_shape, &of_v));
        check(&engine, "shared factors", [&k, &v], &causal);
    }
}

#[test]
fn products_of_int8_of_each_sequence_have_the_bits_of_a_call_alone() {
    let (engine, [k_shape, v_shape]) = (engine(), shapes());
    let k = Coded::new(2, k_shape, Format::Int8, Some(Granularity::Token));
    for (what, of_v) in [("tensor", vec![]), ("head", vec![KV_HEADS]), ("channel", vec![1, KV_HEADS, DIM_V])] {
        let v = Coded::int8(6, v_shape, &of_v);
        for options in [Options::default(), Options::default().with_causal(Causal::BottomRight).with_softcap(3.0)] {
            let exact = check(&engine, what, [&k, &v], &options);
            let int8 = check(&engine, what, [&k, &v], &options.with_compute(Compute::Int8));
            let squares = int8.iter().zip(&exact).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
            let off = (squares / exact.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>()).sqrt();
            assert!((1e-3..2e-2).contains(&off), "{what}: products of int8 are {off} from exact ones");
        }
    }
}

#[test]
fn factors_that_do_not_fit_are_refused_and_nothing_is_written() {
    let (engine, [k_shape, v_shape]) = (engine(), shapes());
    let keys = k_shape[0];
    let k = Coded::new(2, k_shape, Format::Int8, Some(Granularity::Token));
    for shape in [vec![keys - 1, KV_HEADS], vec![Q_LENS.len(), KV_HEADS], vec![1], vec![keys], vec![1, 1, DIM_V]] {
        let v = Coded::int8(6, v_shape, &shape);
        let error = varlen(&engine, [&k, &v], &Options::default()).unwrap_err();
        assert!(matches!(error, Error::DescaleShape { tensor: "v_descale", .. }), "{shape:?}: {error}");
    }
    let v = Coded::new(3, v_shape, Format::Int8, Some(Granularity::Token));
    let error = varlen(&engine, [&k, &v], &Options::default().with_compute(Compute::Int8)).unwrap_err();
    assert!(error.to_string().contains("with v of int8 codes by token"), "{error}");
    let error = varlen(&engine, [&k, &v], &Options::default().with_compute(Compute::Fp8)).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
}

/// Keys that a cache holds of a sequence.
const ROOM: usize = 160;

/// Attention of sequences of `lengths` to int8 codes in a cache, keys by token, values by head of a sequence; in pages of `page_size`.
fn cached(engine: &Engine, page_size: Option<usize>, lengths: [i32; 3], options: &Options) -> [Vec<f32>; 2] {
    let rows = page_size.unwrap_or(ROOM);
    let blocks = 3 * ROOM / rows;
    // Pages of a sequence from the last one down.
    let table: Vec<i32> = (0..blocks as i32).rev().collect();
    let [k, v] = [(2, DIM), (3, DIM_V)].map(|(seed, dim)| {
        let whole = Coded::new(seed, [3 * ROOM, KV_HEADS, dim], Format::Int8, Some(Granularity::Token));
        // The same keys lie in the same order of each sequence, whatever the pages.
        let row_of = |j: usize| match page_size {
            None => j,
            Some(size) => table[j / size] as usize * size + j % size,
        };
        let mut codes = vec![0u8; 3 * ROOM * KV_HEADS * dim];
        let mut factors = vec![0f32; 3 * ROOM * KV_HEADS];
        for j in 0..3 * ROOM {
            let (to, bytes) = (row_of(j), KV_HEADS * dim);
            codes[to * bytes..][..bytes].copy_from_slice(&whole.quantized.codes()[j * bytes..][..bytes]);
            let of = &whole.quantized.scale_f32().unwrap()[j * KV_HEADS..][..KV_HEADS];
            factors[to * KV_HEADS..][..KV_HEADS].copy_from_slice(of);
        }
        (codes, factors)
    });
    let of_heads = numbers(9, 3 * KV_HEADS);
    let q = numbers(1, 3 * 2 * HEADS * DIM);
    let (mut out, mut lse) = (vec![f32::NAN; 3 * 2 * HEADS * DIM_V], vec![f32::NAN; 3 * HEADS * 2]);
    let tensor = |name, codes, dim| {
        let view = View::contiguous(name, codes, [blocks, rows, KV_HEADS, dim].into())?;
        view.reinterpreted(name, DType::I8)
    };
    let form = |descale, dim| CacheCodes {
        format: Format::Int8,
        descale: CacheView::Read(descale),
        zero_point: None,
        global_scale: None,
        granularity: None,
        head_dim: Some(dim),
    };
    let tensors = KvCacheTensors {
        q: View::contiguous("q", &q, [3, 2, HEADS, DIM].into()).unwrap(),
        k_cache: CacheView::Read(tensor("k_cache", &k.0, DIM).unwrap()),
        v_cache: CacheView::Read(tensor("v_cache", &v.0, DIM_V).unwrap()),
        k_codes: Some(form(View::contiguous("k_descale", &k.1, [blocks, rows, KV_HEADS].into()).unwrap(), DIM)),
        v_codes: Some(form(View::contiguous("v_descale", &of_heads, [3, KV_HEADS].into()).unwrap(), DIM_V)),
        k: None,
        v: None,
        cache_seqlens: Some(View::contiguous("cache_seqlens", &lengths, [3].into()).unwrap()),
        page_table: page_size.map(|size| View::contiguous("page_table", &table, [3, ROOM / size].into()).unwrap()),
        sinks: None,
        alibi_slopes: None,
        out: ViewMut::contiguous("out", &mut out, [3, 2, HEADS, DIM_V].into()).unwrap(),
        lse: Some(ViewMut::contiguous("lse", &mut lse, [3, HEADS, 2].into()).unwrap()),
    };
    engine.attention_with_kvcache(tensors, options, &Queue::Host(engine.executor())).unwrap();
    [out, lse]
}

#[test]
fn products_of_int8_in_caches_have_the_bits_of_calls_alone() {
    let (engine, lengths) = (engine(), [0, 5, ROOM as i32]);
    let causal = Options::default().with_causal(Causal::BottomRight);
    let (k, v) = ([3 * ROOM, KV_HEADS, DIM], [3 * ROOM, KV_HEADS, DIM_V]);
    let k = Coded::new(2, k, Format::Int8, Some(Granularity::Token));
    let v = Coded::new(3, v, Format::Int8, Some(Granularity::Token));
    let (q, of_heads) = (numbers(1, 3 * 2 * HEADS * DIM), numbers(9, 3 * KV_HEADS));
    let exact = cached(&engine, None, lengths, &causal);
    for page_size in [None, Some(1), Some(4), Some(16), Some(ROOM)] {
        let options = causal.with_compute(Compute::Int8);
        let [out, lse] = cached(&engine, page_size, lengths, &options);
        assert_ne!(bits(&out), bits(&exact[0]), "products of int8 are an approximation");
        for (b, length) in lengths.into_iter().enumerate() {
            let keys = b * ROOM..b * ROOM + length as usize;
            let descale =
                View::contiguous("v_descale", &of_heads[b * KV_HEADS..][..KV_HEADS], [KV_HEADS].into()).unwrap();
            let of_v = Codes { head_dim: Some(DIM_V), ..Codes::new(Format::Int8, descale) };
            let q = &q[b * 2 * HEADS * DIM..][..2 * HEADS * DIM];
            let [one, one_lse] =
                alone(&engine, q, [k.cut(keys.clone()), (v.tensor().narrow(0, &keys), of_v)], &options);
            let what = format!("pages of {page_size:?}, sequence {b}");
            assert_eq!(bits(&out[b * 2 * HEADS * DIM_V..][..2 * HEADS * DIM_V]), bits(&one), "{what}");
            assert_eq!(bits(&lse[b * 2 * HEADS..][..2 * HEADS]), bits(&one_lse), "{what}");
        }
    }
}
