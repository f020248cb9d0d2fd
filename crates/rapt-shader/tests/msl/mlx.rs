//! The positive control of the host: kernels that run on Apple's GPUs, as they were published, give the reference's numbers in it.
//!
//! ```text
//! the wheel of MLX ─► its headers ─► host::build_with ─► what the testkit asks, compared with float64
//! ```
//! They rely on what a text of Rapt does not ask: which elements of a matrix a thread has, sums and exchanges of a simdgroup. Changed in them are function constants, which a host
//! of Metal sets too, and where arrays of threadgroup memory are declared. Deliberately absent: the headers, which `cargo xtask test` fetches (`RAPT_MLX`).

use std::path::PathBuf;
use std::sync::Arc;

use rapt_core::{Causal, DType, Error, Operands, Spec, TensorSpec, Tensors, View};
use rapt_testkit::{Case, replay};

use crate::host::{self, Arithmetic, Bound, Compiled, GROUP, GROUPS, Headers};

/// The name by which `RAPT_REQUIRE` asks for the headers.
const NAME: &str = "mlx";

/// Headers of MLX that are of other numbers, that tell address spaces apart, or that have products of other kernels (attn.h); and parts of <metal_stdlib> by their own
/// names.
const REPLACED: [(&str, &[&str]); 7] = [
    ("mlx/backend/metal/kernels/utils.h", &[]),
    ("mlx/backend/metal/kernels/steel/utils.h", &[]),
    ("mlx/backend/metal/kernels/steel/utils/type_traits.h", &[]),
    (
        "mlx/backend/metal/kernels/steel/attn/attn.h",
        &[
            "mlx/backend/metal/kernels/steel/attn/loader.h",
            "mlx/backend/metal/kernels/steel/attn/mma.h",
            "mlx/backend/metal/kernels/steel/attn/params.h",
        ],
    ),
    ("metal_math", &[]),
    ("metal_simdgroup", &[]),
    ("metal_simdgroup_matrix", &[]),
];

/// The folder of the headers; without it that is printed, and a failure if `RAPT_REQUIRE` names `mlx`.
fn headers() -> Option<PathBuf> {
    let folder = std::env::var_os("RAPT_MLX").map(PathBuf::from);
    let required = std::env::var("RAPT_REQUIRE").unwrap_or_default();
    assert!(
        folder.is_some() || !required.split(',').any(|name| name == NAME),
        "RAPT_REQUIRE asks for {NAME}: RAPT_MLX names no folder of its headers"
    );
    if folder.is_none() {
        println!("1 test skipped: RAPT_MLX names no folder of MLX's headers");
    }
    folder.filter(|_| host::has_compiler())
}

/// `text` with its function constants set to `constants`, and its threadgroup memory where the host has it.
fn specialized(text: &str, constants: &[(&str, &str)]) -> String {
    let mut whole = String::new();
    for line in text.lines() {
        let words: Vec<&str> = line.trim_end_matches(';').split([' ', '[']).filter(|word| !word.is_empty()).collect();
        match *words {
            ["constant", ty, name, ..] if line.contains("function_constant") => {
                let value = constants.iter().find(|(constant, _)| *constant == name).map_or("0", |(_, value)| *value);
                whole.push_str(&format!("static constexpr {ty} {name} = {value};"));
            }
            ["threadgroup", ty, name, ..] if line.trim_end().ends_with("];") => {
                let (_, count) = line.split_once('[').expect("an array");
                whole.push_str(&format!(
                    "alignas(1 << 16) static {ty} {name}[{count} rapt_space(\"{name}\", &{name}, sizeof {name});"
                ));
            }
            _ => whole.push_str(line),
        }
        whole.push('\n');
    }
    whole
}

/// A kernel of MLX.
struct Published {
    /// Its header, below MLX's kernels.
    header: &'static str,
    constants: Vec<(&'static str, &'static str)>,
    /// The call: `SLOT(n)` is slot n, `VALUE(type, n)` a value n bytes behind the begin of slot 0.
    call: String,
    threads: usize,
    /// Rows of a workgroup; 0 where heads come first.
    rows: usize,
    /// What is planted, if something is.
    mistake: Option<(&'static str, &'static str)>,
}

impl Published {
    fn program(&self, text: &str) -> String {
        let text = specialized(text, &self.constants);
        let text = match self.mistake {
            None => text,
            Some((from, to)) => {
                assert!(text.contains(from), "the text has no `{from}`");
                text.replacen(from, to, 1)
            }
        };
        let Published { call, .. } = self;
        let begin = "const char* values = static_cast<const char*>(slots[0]);\n    (void)values;";
        let entry = host::entry(&format!("{begin}\n    {call}"));
        let at = "#undef thread\n#define SLOT(n) Slot{slots[n]}\n#define VALUE(type, n) *reinterpret_cast<const type*>(values + n)";
        format!("#include \"mlx.h\"\n{text}\n{at}\n{entry}")
    }
}

/// Values by their types, each at a multiple of its size.
#[derive(Default)]
struct Values(Vec<u8>);

impl Values {
    fn put<const N: usize>(&mut self, bytes: [u8; N]) {
        self.0.resize(self.0.len().next_multiple_of(N), 0);
        self.0.extend(bytes);
    }
    fn ints(&mut self, ints: &[usize]) {
        ints.iter().for_each(|int| self.put((*int as i32).to_ne_bytes()));
    }
    fn longs(&mut self, longs: &[isize]) {
        longs.iter().for_each(|long| self.put((*long as i64).to_ne_bytes()));
    }
    fn whole(mut self) -> Vec<u8> {
        self.0.resize(self.0.len().next_multiple_of(16), 0);
        self.0
    }
}

/// Strides of a tensor that lies row by row.
fn row_by_row(shape: [usize; 4]) -> [isize; 4] {
    let [_, heads, rows, columns] = shape.map(|n| n as isize);
    [heads * rows * columns, rows * columns, columns, 1]
}

/// MLX's `AttnParams`, for blocks of 32 rows and `block_k` keys.
fn steel_values(spec: &Spec, block_k: usize) -> Vec<u8> {
    let (rows, keys) = (spec.q_len(), spec.kv_len());
    let mut values = Values::default();
    values.ints(&[spec.batch(), spec.num_q_heads(), spec.head_dim(), rows, keys, spec.group_size()]);
    values.put((spec.softmax_scale.get() as f32).to_ne_bytes());
    values.ints(&[rows.div_ceil(32), keys.div_ceil(block_k), rows / 32, keys / block_k, rows % 32, keys % block_k]);
    values.put((keys as i32 - rows as i32).to_ne_bytes());
    for tensor in [&spec.q, &spec.k, &spec.v, &spec.out] {
        values.longs(&row_by_row(tensor.shape)[..3]);
    }
    values.whole()
}

/// The scalars of `sdpa_vector`.
fn vector_values(spec: &Spec) -> Vec<u8> {
    let mut values = Values::default();
    values.ints(&[spec.group_size(), spec.kv_len()]);
    for tensor in [&spec.k, &spec.v] {
        values.longs(&row_by_row(tensor.shape)[1..3]);
    }
    values.put((spec.softmax_scale.get() as f32).to_ne_bytes());
    values.ints(&[0, 0, 0, spec.num_q_heads()]);
    values.whole()
}

/// The elements of a tensor, row by row: where each lies, from the first byte on.
fn places<const N: usize>(tensor: &TensorSpec<N>) -> Vec<isize> {
    let mut places = vec![0];
    for (&n, &stride) in tensor.shape.iter().zip(&tensor.strides) {
        let of = |place: isize| (0..n).map(move |at| place + at as isize * stride);
        places = places.into_iter().flat_map(of).collect();
    }
    places.into_iter().map(|place| place * tensor.dtype.size_bytes() as isize).collect()
}

/// MLX copies what does not lie row by row, and so is done here.
fn packed<const N: usize>(tensor: &TensorSpec<N>, begin: *const u8) -> Vec<u8> {
    let size = tensor.dtype.size_bytes();
    // SAFETY: elements of a view that was checked.
    let bytes = |place| unsafe { std::slice::from_raw_parts(begin.wrapping_offset(place), size) };
    places(tensor).into_iter().flat_map(|place| bytes(place).to_vec()).collect()
}

fn unpack<const N: usize>(tensor: &TensorSpec<N>, bytes: &[u8], begin: *mut u8) {
    let size = tensor.dtype.size_bytes();
    for (place, bytes) in places(tensor).into_iter().zip(bytes.chunks(size)) {
        // SAFETY: elements of a view that was checked and may be written.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), begin.wrapping_offset(place), size) };
    }
}

fn run(
    published: &Published,
    program: &Compiled,
    values: &[u8],
    spec: &Spec,
    tensors: Tensors<'_>,
) -> Result<(), Error> {
    let mut operands = Operands::check(tensors, spec)?;
    let (out, lse) = (operands.out_ptr(), operands.lse_ptr());
    let tensors = operands.tensors();
    let input = |view: &View<'_>| std::ptr::with_exposed_provenance::<u8>(view.address());
    let inputs = [(1, "q", &tensors.q, spec.q), (2, "k", &tensors.k, spec.k), (3, "v", &tensors.v, spec.v)];
    let mut held: Vec<(u32, &str, Vec<u8>)> = Vec::new();
    for (slot, name, view, tensor) in inputs {
        held.push((slot, name, packed(&tensor, input(view))));
    }
    held.push((7, "out", vec![0; places(&spec.out).len() * spec.out.dtype.size_bytes()]));
    held.extend(spec.lse.map(|lse| (8, "lse", vec![0; places(&lse).len() * 4])));
    // Of 16 bytes, as vectors are.
    let mut aligned: Vec<Vec<u128>> = held.iter().map(|(.., bytes)| vec![0; bytes.len().div_ceil(16)]).collect();
    let bound: Vec<Bound> = held
        .iter()
        .zip(&mut aligned)
        .map(|((slot, name, bytes), words)| {
            let begin = words.as_mut_ptr().cast::<u8>();
            // SAFETY: there are at least as many.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), begin, bytes.len()) };
            Bound { index: *slot, name, begin, len_bytes: bytes.len(), is_output: *slot >= 7 }
        })
        .collect();
    let (heads, rows) = (spec.num_q_heads() as u32, spec.q_len());
    let groups = match published.rows {
        0 => (heads, rows as u32),
        of_group => (rows.div_ceil(of_group) as u32, heads),
    };
    program
        .run_bytes(published.threads, groups, values, &bound)
        .map_err(|why| Error::DeviceFailed { device: rapt_core::Device::Cpu, why })?;
    for bound in bound.iter().filter(|bound| bound.is_output) {
        // SAFETY: the bytes of a buffer that is held, which nothing writes any more.
        let bytes = unsafe { std::slice::from_raw_parts(bound.begin, bound.len_bytes) };
        match (bound.index, lse, spec.lse) {
            (8, Some(begin), Some(lse)) => unpack(&lse, bytes, begin),
            _ => unpack(&spec.out, bytes, out),
        }
    }
    Ok(())
}

/// What the testkit says of `published` on `case`.
fn answer(
    folder: &std::path::Path,
    published: &Published,
    case: &Case,
    values: impl Fn(&Spec) -> Vec<u8>,
) -> Result<(), String> {
    let path = folder.join("mlx/backend/metal/kernels").join(published.header);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let headers = Headers { folder, replaced: &REPLACED };
    let program: Arc<Compiled> = host::build_with(&published.program(&text), Arithmetic::Fast, Some(headers))
        .unwrap_or_else(|error| panic!("{}: {error}", published.header));
    let mut engine = |spec: &Spec, tensors: Tensors<'_>| run(published, &program, &values(spec), spec, tensors);
    replay(&mut engine, case).map_err(|failure| failure.to_string())
}

/// Prefill on matrices of simdgroups: `T` and `columns` as MLX instantiates them.
fn steel(number: &str, columns: usize, block_k: usize, is_causal: bool) -> Published {
    Published {
        header: "steel/attn/kernels/steel_attention.h",
        constants: vec![("do_causal", if is_causal { "true" } else { "false" }), ("save_lse", "true")],
        call: format!(
            "attention<{number}, 32, {block_k}, {columns}, {columns}, 4, 1, {number}>(SLOT(1), SLOT(2), SLOT(3), SLOT(7), \
             reinterpret_cast<const AttnParams*>(values), nullptr, nullptr, nullptr, SLOT(8), \
             thread % 32, thread / 32, {GROUP}, metal::uint3{{thread, 0, 0}});"
        ),
        threads: 128,
        rows: 32,
        mistake: None,
    }
}

/// Few queries: sums and maxima of simdgroups.
fn vector(number: &str, columns: usize, is_causal: bool) -> Published {
    Published {
        header: "sdpa_vector.h",
        constants: vec![("do_causal", if is_causal { "true" } else { "false" })],
        call: format!(
            "sdpa_vector<{number}, {columns}>(SLOT(1), SLOT(2), SLOT(3), SLOT(7), VALUE(int, 0), VALUE(int, 4), VALUE(size_t, 8), VALUE(size_t, 16), \
             VALUE(size_t, 24), VALUE(size_t, 32), VALUE(float, 40), SLOT(4), SLOT(4), VALUE(int, 44), VALUE(int, 48), VALUE(int, 52), SLOT(5), VALUE(int, 56), \
             {GROUP}, {GROUPS}, thread / 32, thread % 32);"
        ),
        threads: 1024,
        rows: 0,
        mistake: None,
    }
}

/// Rows and keys that are no multiples of a block, and heads that share keys.
fn case(dtype: DType, q_len: usize, columns: usize, is_causal: bool) -> Case {
    Case {
        num_kv_heads: 2,
        causal: is_causal.then_some(Causal::BottomRight),
        ..Case::plain(dtype, [1, 4, q_len, columns], 75)
    }
}

#[test]
fn published_kernels_give_the_reference_s_numbers() {
    let Some(folder) = headers() else { return };
    answer(&folder, &steel("half", 64, 32, true), &case(DType::F16, 45, 64, true), |spec| steel_values(spec, 32))
        .unwrap();
    answer(&folder, &vector("half", 64, true), &Case { lse: false, ..case(DType::F16, 3, 64, true) }, vector_values)
        .unwrap();
}

/// Wider heads, float32; and a barrier less is found. What MLX says of rows that attend no key is not the definition's, so no mask is among them.
#[test]
#[ignore = "takes a minute"]
fn published_kernels_of_other_sizes_do_too() {
    let Some(folder) = headers() else { return };
    let of_16 = |spec: &Spec| steel_values(spec, 16);
    answer(&folder, &steel("half", 128, 16, false), &case(DType::F16, 64, 128, false), of_16).unwrap();
    answer(&folder, &steel("float", 128, 16, false), &case(DType::F32, 45, 128, false), of_16).unwrap();
    answer(
        &folder,
        &vector("float", 128, false),
        &Case { lse: false, ..case(DType::F32, 2, 128, false) },
        vector_values,
    )
    .unwrap();
    let barrier = "    // Load V into registers\n    threadgroup_barrier(mem_flags::mem_threadgroup);";
    let broken = Published { mistake: Some((barrier, "")), ..steel("half", 64, 32, true) };
    let found = answer(&folder, &broken, &case(DType::F16, 45, 64, true), |spec| steel_values(spec, 32)).unwrap_err();
    assert!(found.contains("what another thread"), "{found}");
}
