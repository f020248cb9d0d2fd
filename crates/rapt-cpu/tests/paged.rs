//! Keys and values in pages of a cache: the bits of the same keys in one tensor, whatever the pages, their order, their strides and what
//! else they hold; and page tables that are not to be trusted.

use rapt_core::{
    Arch, Caps, Codes, DType, Error, Granularity, Operands, Options, Qkv, SerialExecutor, Spec, TensorLayout, Tensors,
    View, Workspace,
};
use rapt_testkit::{Case, CodesCase, Guard, Placement, Rng, ScaleValues, TensorBuf, Values, zoo};

const PAGE_SIZES: [usize; 13] = [1, 2, 3, 4, 5, 7, 8, 16, 17, 32, 64, 100, 256];

/// The pages of one sequence among those of a cache.
struct Pages {
    size: usize,
    count: usize,
    /// With entries behind those that are used, of pages that the cache does not have.
    table: Vec<i32>,
}

impl Pages {
    fn random(rng: &mut Rng, kv_len: usize) -> Pages {
        let size = rng.pick(&PAGE_SIZES);
        let used = kv_len.div_ceil(size);
        let count = used + rng.below(4);
        let mut all: Vec<i32> = (0..count as i32).collect();
        for at in (1..all.len()).rev() {
            all.swap(at, rng.below(at + 1));
        }
        all.truncate(used);
        all.extend([i32::MAX, -1].into_iter().take(rng.below(3)));
        Pages { size, count, table: all }
    }

    /// `values` of shape `[1, heads, kv_len, dim]` as `[count, heads, size, dim]`, with `rest` wherever no key lies.
    fn spread(&self, values: &[f64], [_, heads, kv_len, dim]: [usize; 4], rest: f64) -> (Vec<f64>, [usize; 4]) {
        let shape = [self.count, heads, self.size, dim];
        let mut pages = vec![rest; shape.iter().product()];
        for (row, from) in values.chunks(dim.max(1)).enumerate() {
            let (head, j) = (row / kv_len, row % kv_len);
            let page = self.table[j / self.size] as usize;
            pages[((page * heads + head) * self.size + j % self.size) * dim..][..dim].copy_from_slice(from);
        }
        (pages, shape)
    }
}

/// K or V, with what makes numbers of it.
struct Stored {
    tensor: TensorBuf,
    codes: Option<(CodesCase, TensorBuf, Option<TensorBuf>, Option<f32>)>,
    dim: usize,
}

/// The numbers of an operand: their shape, and as they are stored.
struct Given<'a> {
    shape: [usize; 4],
    stored: [usize; 4],
    values: &'a [f64],
    codes: Option<(CodesCase, &'a ScaleValues)>,
    dtype: DType,
}

impl Stored {
    /// In one tensor, or in pages placed somehow.
    fn new(given: &Given<'_>, pages: Option<&Pages>, guard: Guard, rng: &mut Rng) -> Stored {
        let mut place = |shape: [usize; 4]| -> Placement {
            let mut all: Vec<Placement> = zoo(shape).into_iter().filter(|place| place.injective).collect();
            let at = if pages.is_some() { rng.below(all.len()) } else { 0 };
            all.swap_remove(at)
        };
        let mut buffer = |dtype: DType, shape: [usize; 4], values: &[f64], rest: f64, by_key: bool| {
            let (values, shape) = match pages.filter(|_| by_key) {
                Some(pages) => pages.spread(values, shape, rest),
                None => (values.to_vec(), shape),
            };
            TensorBuf::new(dtype, shape, &place(shape), guard, Some(&values))
        };
        let rest = if given.codes.is_some() { 127.0 } else { f64::NAN };
        let dtype = given.codes.map_or(given.dtype, |(codes, _)| codes.format.code_dtype());
        let tensor = buffer(dtype, given.stored, given.values, rest, true);
        let codes = given.codes.map(|(codes, scales)| {
            let by_key = matches!(codes.granularity, Granularity::Token | Granularity::Block(_));
            let (groups, dtype) = (codes.groups(given.shape), codes.format.scale_dtype());
            let rest = if dtype == DType::F32 { f64::NAN } else { 255.0 };
            let descale = buffer(dtype, groups, &scales.descale, rest, by_key);
            let points = scales.zero_point.as_ref();
            let points = points.map(|points| buffer(DType::U8, groups, points, 255.0, by_key));
            (codes, descale, points, scales.global)
        });
        Stored { tensor, codes, dim: given.shape[3] }
    }

    fn codes(&self, layout: TensorLayout) -> Option<Box<Codes<'_>>> {
        let (case, descale, points, global_scale) = self.codes.as_ref()?;
        let zero_point = points.as_ref().map(|points| scales(points, case.granularity, layout));
        let granularity = matches!(case.granularity, Granularity::Block(_)).then_some(case.granularity);
        let head_dim = (case.format.codes_per_byte() > 1).then_some(self.dim);
        let codes = Codes::new(case.format, scales(descale, case.granularity, layout));
        Some(Box::new(Codes { zero_point, global_scale: *global_scale, granularity, head_dim, ..codes }))
    }
}

/// Scales less the dimensions that their granularity does not have.
fn scales(of: &TensorBuf, granularity: Granularity, layout: TensorLayout) -> View<'_> {
    let whole = of.view("scale", 4, layout);
    match granularity {
        Granularity::Token => whole.index(3, 0),
        Granularity::Head => whole.index(3, 0).index(if layout == TensorLayout::Bshd { 1 } else { 2 }, 0),
        Granularity::Tensor => (0..4).fold(whole, |view, _| view.index(0, 0)),
        _ => whole,
    }
}

fn flat(of: &TensorBuf) -> View<'_> {
    of.view("vector", 1, TensorLayout::Bhsd)
}

/// The bits of out and lse of a case of one sequence, in one tensor or in pages.
fn run(arch: Arch, case: &Case, values: &Values, pages: Option<&Pages>, rng: &mut Rng) -> Result<Vec<u64>, Error> {
    let (layout, guard) = (case.layout, case.guard);
    let packed = |shape: [usize; 4]| zoo(shape).swap_remove(0);
    let new = |dtype, shape, values: Option<&[f64]>| TensorBuf::new(dtype, shape, &packed(shape), guard, values);
    let [q_stored, k_stored, v_stored] = case.stored();
    let q = Given { shape: case.q, stored: q_stored, values: &values.q, codes: None, dtype: case.dtype };
    let q = Given { codes: case.codes.q.zip(values.scales.q.as_ref()), ..q };
    let (shape, codes) = (case.k(), case.codes.k.zip(values.scales.k.as_ref()));
    let k = Given { shape, stored: k_stored, values: &values.k, codes, dtype: case.dtype };
    let (shape, codes) = (case.v(), case.codes.v.zip(values.scales.v.as_ref()));
    let v = Given { shape, stored: v_stored, values: &values.v, codes, dtype: case.dtype };
    let q = Stored::new(&q, None, guard, rng);
    let (k, v) = (Stored::new(&k, pages, guard, rng), Stored::new(&v, pages, guard, rng));
    // Every second element: a table may be a column of another.
    let entries: Option<Vec<i32>> = pages.map(|pages| pages.table.iter().flat_map(|&page| [page, -7]).collect());
    let table = entries.as_deref().map(|entries| {
        let len = entries.len() / 2;
        View::strided("page_table", entries, 0, [len].into(), [2].into()).unwrap()
    });
    let mask = case.mask.as_ref().zip(values.mask.as_deref());
    let mask = mask.map(|(mask, values)| (new(mask.dtype, case.mask_shape(mask), Some(values)), mask.rank));
    let vector = |dtype: Option<DType>, values: &Option<Vec<f64>>| {
        dtype.zip(values.as_deref()).map(|(dtype, values)| new(dtype, [1, 1, 1, case.q[1]], Some(values)))
    };
    let (sinks, slopes) = (vector(case.sinks, &values.sinks), vector(case.alibi_slopes, &values.alibi_slopes));
    let mut out = new(case.out_dtype.unwrap_or(case.dtype), case.out(), None);
    let mut lse = new(case.dtype.accumulation(), [1, case.q[0], case.q[1], case.q[2]], None);

    let tensors = Tensors {
        codes: Qkv { q: q.codes(layout), k: k.codes(layout), v: v.codes(layout) },
        mask: mask.as_ref().map(|(mask, rank)| mask.view("mask", *rank, TensorLayout::Bhsd)),
        sinks: sinks.as_ref().map(flat),
        alibi_slopes: slopes.as_ref().map(flat),
        page_table: table,
        lse: Some(lse.view_mut("lse", 3, TensorLayout::Bhsd)),
        ..Tensors::new(
            q.tensor.view("q", 4, layout),
            k.tensor.view("k", 4, layout),
            v.tensor.view("v", 4, layout),
            out.view_mut("out", 4, layout),
        )
    };
    attend(arch, tensors, &case.options(), case.kv_len)?;
    for (name, input) in [("q", &q.tensor), ("k", &k.tensor), ("v", &v.tensor)] {
        input.check_unchanged(name).unwrap_or_else(|damage| panic!("{damage}"));
    }
    assert!(!out.has_unwritten() && !lse.has_unwritten());
    let mut bits = out.bits();
    bits.extend(lse.bits());
    Ok(bits)
}

fn attend(arch: Arch, tensors: Tensors<'_>, options: &Options, kv_len: usize) -> Result<(), Error> {
    let mut builder = Spec::builder(&tensors.q, &tensors.k, &tensors.v, options);
    builder
        .codes(tensors.codes.as_deref())
        .mask(tensors.mask.as_ref())
        .sinks(tensors.sinks.as_ref())
        .alibi_slopes(tensors.alibi_slopes.as_ref())
        .out(&tensors.out);
    if let Some(lse) = &tensors.lse {
        builder.lse(lse);
    }
    if let Some(table) = &tensors.page_table {
        builder.pages(table, kv_len);
    }
    let spec = builder.build()?;
    let plan = rapt_cpu::select(&spec, &Caps { arch, threads: 1, clock_hz: None })?;
    let mut workspace = Workspace::new();
    workspace.ensure(plan.workspace_bytes())?;
    rapt_cpu::run(&plan, &mut Operands::check(tensors, &spec)?, &mut workspace, &SerialExecutor)
}

/// A case of one sequence.
fn case(seed: u64) -> Case {
    const DTYPES: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::F64];
    let draw = match seed % 6 {
        0 | 3 => Case::random,
        1 => Case::random_int8,
        _ => Case::random_quantized,
    };
    let mut case = draw(seed, &DTYPES, 400_000);
    case.q[0] = 1;
    case.rank = 4;
    // Few queries of each key head as often as many.
    if seed % 4 < 2 {
        case.q[2] = case.q[2].min(2);
    }
    case.poison = false;
    case
}

#[test]
fn pages_give_the_bits_of_one_tensor() {
    let (mut runs, mut decoded) = (0, 0);
    for seed in 0..600 {
        let (case, mut rng) = (case(seed), Rng::new(seed ^ 0x9a6e));
        let values = case.values();
        let pages = Pages::random(&mut rng, case.kv_len);
        for &arch in rapt_cpu::available() {
            let whole = run(arch, &case, &values, None, &mut rng).unwrap();
            let paged = run(arch, &case, &values, Some(&pages), &mut rng);
            let paged = paged.unwrap_or_else(|error| panic!("{error}: pages of {}, {case:?}", pages.size));
            assert!(whole == paged, "{}: pages of {}, table {:?}, {case:?}", arch.name(), pages.size, pages.table);
            runs += 1;
        }
        decoded += usize::from(case.q[2] * case.q[1] / case.num_kv_heads <= 8);
    }
    println!("{runs} runs; {decoded} cases of few queries");
    assert!(decoded > 200, "{decoded}");
}

/// One head of two queries, `kv_len` keys in pages of 4, of 3 pages.
fn with_table(table: &[i32], kv_len: usize) -> Result<(), Error> {
    let (q, cache) = ([1f32; 2 * 8], [1f32; 3 * 4 * 8]);
    let mut out = [f32::NAN; 2 * 8];
    let q = View::contiguous("q", &q, [1, 1, 2, 8].into())?;
    let cache = View::contiguous("k", &cache, [3, 1, 4, 8].into())?;
    let out_view = rapt_core::ViewMut::contiguous("out", &mut out, [1, 1, 2, 8].into())?;
    let table = View::contiguous("page_table", table, [table.len()].into())?;
    let tensors = Tensors { page_table: Some(table), ..Tensors::new(q, cache, cache, out_view) };
    let done = attend(rapt_cpu::available()[0], tensors, &Options::default(), kv_len);
    assert!(done.is_ok() || out.iter().all(|x| x.is_nan()), "a refused call has written nothing");
    done
}

#[test]
fn a_table_names_pages_of_the_cache_and_has_enough() {
    with_table(&[2, 0, 1], 12).unwrap();
    with_table(&[1, 1], 8).unwrap();
    with_table(&[2, i32::MAX], 4).unwrap();
    with_table(&[], 0).unwrap();
    for (table, at, page) in [([0, 3], 1, 3), ([-1, 0], 0, -1), ([0, i32::MIN], 1, i32::MIN)] {
        assert_eq!(with_table(&table, 5), Err(Error::PageIndex { at, page, num_pages: 3 }));
    }
    assert_eq!(with_table(&[0], 5), Err(Error::PageTableShort { entries: 1, kv_len: 5, page_size: 4 }));
}
