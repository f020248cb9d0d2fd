//! Bad input of every kind: each answers its code with a message that names the offender, writes nothing, and leaves the
//! engine serving.

use std::ffi::c_char;

use crate::support::{BEFORE, Call, K, LSE, MASK, NAMES, OUT, Owned, Q, SINKS, SLOPES, V, last_error};
use rapt_c::rapt_error::{self, *};
use rapt_c::{
    rapt_capabilities, rapt_contiguous_strides, rapt_engine_capabilities, rapt_engine_create, rapt_engine_destroy,
    rapt_engine_gpu, rapt_explain, rapt_last_error_code, rapt_options, rapt_string_free,
};

type Bend = Box<dyn Fn(&mut Call)>;

/// What is bent, the code that answers, and what the message says.
struct Case {
    name: String,
    code: rapt_error,
    says: String,
    bend: Bend,
}

#[derive(Default)]
struct Table(Vec<Case>);

impl Table {
    fn add(&mut self, name: &str, code: rapt_error, says: &str, bend: impl Fn(&mut Call) + 'static) {
        self.0.push(Case { name: name.to_owned(), code, says: says.to_owned(), bend: Box::new(bend) });
    }
}

fn pointers(table: &mut Table) {
    table.add("engine NULL", RAPT_ERROR_POINTER, "engine is NULL", |call| call.engine = std::ptr::null());
    table.add("engine unaligned", RAPT_ERROR_POINTER, "engine leads to", |call| {
        call.engine = call.engine.wrapping_byte_add(1);
    });
    table.add("options unaligned", RAPT_ERROR_POINTER, "options leads to", |call| {
        call.options_arg = call.options_arg.wrapping_byte_add(4);
    });
    for (at, name) in NAMES.into_iter().enumerate() {
        if at <= OUT {
            table.add(&format!("{name} NULL"), RAPT_ERROR_POINTER, &format!("{name} is NULL"), move |call| {
                *call.descriptor(at) = std::ptr::null();
            });
        }
        table.add(&format!("{name} unaligned"), RAPT_ERROR_POINTER, &format!("{name} leads to"), move |call| {
            let descriptor = call.descriptor(at);
            *descriptor = descriptor.wrapping_byte_add(4);
        });
        let says = |what: &str| format!("{name}->{what}");
        table.add(&format!("{name} shape NULL"), RAPT_ERROR_POINTER, &says("shape is NULL"), move |call| {
            call.tensors[at].shape = std::ptr::null();
        });
        table.add(&format!("{name} strides NULL"), RAPT_ERROR_POINTER, &says("strides is NULL"), move |call| {
            call.tensors[at].strides = std::ptr::null();
        });
        table.add(&format!("{name} shape unaligned"), RAPT_ERROR_POINTER, &says("shape leads to"), move |call| {
            call.tensors[at].shape = call.tensors[at].shape.wrapping_byte_add(4);
        });
        table.add(&format!("{name} strides unaligned"), RAPT_ERROR_POINTER, &says("strides leads to"), move |call| {
            call.tensors[at].strides = call.tensors[at].strides.wrapping_byte_add(4);
        });
        table.add(&format!("{name} data NULL"), RAPT_ERROR_LAYOUT, &format!("{name} has a null"), move |call| {
            call.tensors[at].data = std::ptr::null_mut();
        });
        if at != MASK {
            let says = format!("{name} starts at an address that is no multiple of 4 bytes");
            table.add(&format!("{name} data unaligned"), RAPT_ERROR_LAYOUT, &says, move |call| {
                call.tensors[at].data = call.tensors[at].data.wrapping_byte_add(2);
            });
        }
    }
}

fn codes(table: &mut Table) {
    for (at, tensor) in NAMES.into_iter().enumerate() {
        // 263 is 7, float32, in its low byte.
        for code in [-1, 14, 27, 36, 256, 263, i32::MIN, i32::MAX] {
            let name = format!("{tensor} dtype {code}");
            let says = format!("{tensor} has a dtype that is not known: code {code}");
            table.add(&name, RAPT_ERROR_UNSUPPORTED_DTYPE, &says, move |call| call.tensors[at].dtype = code);
        }
        for (device, says) in [(0, "device type 0"), (-1, "device type -1"), (3, "device type 3"), (2, "cuda:0")] {
            let name = format!("{tensor} device {device}");
            table.add(&name, RAPT_ERROR_DEVICE, says, move |call| call.tensors[at].device = device);
        }
        let name = format!("{tensor} device_index 1");
        table.add(&name, RAPT_ERROR_DEVICE, "device_index 1", move |call| call.tensors[at].device_index = 1);
    }
    table.add("all on a GPU", RAPT_ERROR_DEVICE, "cuda:0 is not available", |call| {
        call.tensors.iter_mut().for_each(|tensor| tensor.device = 2);
    });
    table.add("dtype unknown", RAPT_ERROR_UNSUPPORTED_DTYPE, "q has dtype unknown", |call| {
        (Q..=V).for_each(|at| call.tensors[at].dtype = 0);
    });
    table.add("int32", RAPT_ERROR_UNSUPPORTED_DTYPE, "q has dtype int32", |call| {
        (Q..=V).for_each(|at| call.tensors[at].dtype = 4);
    });
    table.add("k of another dtype", RAPT_ERROR_DTYPE_MISMATCH, "k has dtype float16", |call| call.tensors[K].dtype = 6);
    for (at, dtype, code) in [
        (MASK, 1, RAPT_ERROR_UNSUPPORTED_DTYPE),
        (SINKS, 4, RAPT_ERROR_UNSUPPORTED_DTYPE),
        (SLOPES, 12, RAPT_ERROR_UNSUPPORTED_DTYPE),
        (OUT, 4, RAPT_ERROR_DTYPE_MISMATCH),
        (LSE, 6, RAPT_ERROR_DTYPE_MISMATCH),
        (LSE, 4, RAPT_ERROR_DTYPE_MISMATCH),
    ] {
        let says = format!("{} has dtype", NAMES[at]);
        let name = format!("{} of dtype {dtype}", NAMES[at]);
        table.add(&name, code, &says, move |call| call.tensors[at].dtype = dtype);
    }
    for causal in [-1, 3, i32::MAX] {
        let says = format!("causal = {causal}");
        table.add(&says, RAPT_ERROR_OPTION, &says, move |call| call.options.causal = causal);
    }
    for layout in [-1, 2, i32::MIN] {
        let says = format!("layout = {layout}");
        table.add(&says, RAPT_ERROR_OPTION, &says, move |call| call.options.layout = layout);
    }
    for compute in [-1, 3, i32::MAX] {
        let says = format!("compute = {compute}");
        table.add(&says, RAPT_ERROR_OPTION, &says, move |call| call.options.compute = compute);
    }
    table.add("fp8", RAPT_ERROR_UNSUPPORTED, "compute=\"fp8\" on cpu", |call| call.options.compute = 2);
    table.add("int8 of numbers", RAPT_ERROR_UNSUPPORTED, "with k that is no codes", |call| call.options.compute = 1);
    for (dtype, says) in [(99, "out_dtype has a dtype that is not known"), (12, "out has dtype bool"), (8, "out has")] {
        let name = format!("out_dtype {dtype}");
        table.add(&name, RAPT_ERROR_UNSUPPORTED_DTYPE, says, move |call| call.options.out_dtype = dtype);
    }
}

fn options(table: &mut Table) {
    const SIZE: usize = size_of::<rapt_options>();
    /// Of version 0.1 before q, k and v could be codes.
    const FIRST: usize = std::mem::offset_of!(rapt_options, q_codes);
    /// Before heads on codes could be judged.
    const SECOND: usize = std::mem::offset_of!(rapt_options, tolerance);
    /// Before products could be of anything but numbers.
    const THIRD: usize = std::mem::offset_of!(rapt_options, compute);
    /// Before weights could be dropped.
    const FOURTH: usize = std::mem::offset_of!(rapt_options, dropout_p);
    /// Before a draw could lie in a GPU's memory.
    const FIFTH: usize = std::mem::offset_of!(rapt_options, dropout_draw);
    for size in [
        0,
        1,
        FIRST - 8,
        FIRST + 8,
        SECOND - 8,
        SECOND + 1,
        THIRD + 4,
        FIFTH - 8,
        SIZE - 1,
        SIZE + 1,
        SIZE + 8,
        usize::MAX,
    ] {
        let says =
            format!("options.size = {size}; allowed: {FIRST} or {SECOND} or {THIRD} or {FOURTH} or {FIFTH} or {SIZE}");
        table.add(&says, RAPT_ERROR_OPTION, &says, move |call| call.options.size = size);
    }
    table.add("given: a bit that is none", RAPT_ERROR_OPTION, "given = 0x15", |call| call.options.given |= 16);
    let numbers = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
    for number in numbers {
        let says = format!("scale = {number}");
        table.add(&says, RAPT_ERROR_OPTION, &says, move |call| call.options.softmax_scale = number);
    }
    for number in [numbers.as_slice(), &[0.0, -0.0, -1.0]].concat() {
        table.add(&format!("softcap = {number}"), RAPT_ERROR_OPTION, "softcap = ", move |call| {
            call.options.given |= 2;
            call.options.softcap = number;
        });
    }
    for p in [-0.5, 1.5, f64::NAN] {
        table.add(&format!("dropout_p = {p}"), RAPT_ERROR_OPTION, "dropout_p = ", move |call| {
            call.options.dropout_p = p;
        });
    }
    table.add("a seed alone", RAPT_ERROR_OPTION, "dropout_seed = 7", |call| call.options.dropout_seed = 7);
    table.add("an offset alone", RAPT_ERROR_OPTION, "dropout_offset = 7", |call| call.options.dropout_offset = 7);
    let draw = std::ptr::without_provenance::<u64>;
    table.add("a draw alone", RAPT_ERROR_OPTION, "dropout_draw = not NULL", move |call| {
        call.options.dropout_draw = draw(64);
    });
    table.add("a draw beside a seed", RAPT_ERROR_OPTION, "dropout_seed = 7", move |call| {
        (call.options.dropout_p, call.options.dropout_seed, call.options.dropout_draw) = (0.5, 7, draw(64));
    });
    table.add("a draw at an odd address", RAPT_ERROR_OPTION, "dropout_draw = 0x41", move |call| {
        (call.options.dropout_p, call.options.dropout_draw) = (0.5, draw(0x41));
    });
    table.add("a draw in host memory", RAPT_ERROR_UNSUPPORTED, "dropout_draw in memory of cpu", move |call| {
        (call.options.dropout_p, call.options.dropout_draw) = (0.5, draw(64));
    });
    for (name, bit) in [("window_left", 4), ("window_right", 8)] {
        table.add(&format!("{name} = -1"), RAPT_ERROR_OPTION, &format!("{name} = -1"), move |call| {
            call.options.given |= bit;
            (call.options.window_left, call.options.window_right) = (-1, -1);
            if bit == 8 {
                call.options.window_left = 0;
            }
        });
    }
    table.add("softmax_scale without its bit", RAPT_ERROR_OPTION, "softmax_scale = 0.75", |c| c.options.given &= !1);
    table.add("softcap without its bit", RAPT_ERROR_OPTION, "softcap = 2", |call| call.options.softcap = 2.0);
    table.add("window_left without its bit", RAPT_ERROR_OPTION, "window_left = 3", |call| call.options.given &= !4);
    table.add("window_right without its bit", RAPT_ERROR_OPTION, "window_right = -1", |c| c.options.window_right = -1);
}

fn sizes(table: &mut Table) {
    for (at, tensor) in NAMES.into_iter().enumerate() {
        for ndim in [-1, 9, i32::MIN, i32::MAX] {
            let says = format!("{tensor} has ndim {ndim}; allowed: 0 to 8");
            table.add(&says, RAPT_ERROR_SHAPE, &says, move |call| call.tensors[at].ndim = ndim);
        }
        let says = format!("{tensor} has size -1 in dimension 0");
        table.add(&says, RAPT_ERROR_SHAPE, &says, move |call| call.shapes[at][0] = -1);
        table.add(&format!("{tensor} of 2^62 by 2^62"), RAPT_ERROR_SHAPE, "overflows", move |call| {
            call.tensors[at].ndim = 4;
            call.shapes[at] = [1 << 62; 8];
            call.strides[at] = [1; 8];
        });
        table.add(&format!("{tensor} with strides of 2^62"), RAPT_ERROR_SHAPE, "overflows", move |call| {
            call.shapes[at][0] = 3;
            call.strides[at][0] = 1 << 62;
        });
    }
    for ndim in [0, 1, 5, 8] {
        table.add(&format!("rank {ndim}"), RAPT_ERROR_SHAPE, "dimensions", move |call| {
            for at in Q..=OUT {
                call.tensors[at].ndim = ndim;
                call.shapes[at] = [1; 8];
            }
        });
    }
    let cases: [(&str, &str, usize, usize, i64); 9] = [
        ("another batch", "k has batch 0", K, 0, 0),
        ("k and v of different heads", "v has num_kv_heads 1", V, 1, 1),
        ("k and v of different length", "v has kv_len 4", V, 2, 4),
        ("another head_dim", "k has head_dim 3", K, 3, 3),
        ("head_dim_v 0", "v has head_dim 0", V, 3, 0),
        ("a mask that does not broadcast", "mask of shape", MASK, 3, 4),
        ("sinks of another length", "sinks has shape [1]", SINKS, 0, 1),
        ("lse of another shape", "lse has shape", LSE, 2, 2),
        ("out of another shape", "out has shape", OUT, 2, 2),
    ];
    for (name, says, at, dim, size) in cases {
        table.add(name, RAPT_ERROR_SHAPE, says, move |call| call.shapes[at][dim] = size);
    }
    table.add("heads that do not group", RAPT_ERROR_SHAPE, "q has 1 heads, k and v have 2", |call| {
        (call.shapes[Q][1], call.shapes[OUT][1]) = (1, 1);
    });
}

fn memory(table: &mut Table) {
    for (at, name) in NAMES.into_iter().enumerate() {
        table.add(&format!("{name} past its storage"), RAPT_ERROR_LAYOUT, "its storage holds", move |call| {
            call.tensors[at].storage_bytes = 1;
        });
        table.add(&format!("{name} before its storage"), RAPT_ERROR_LAYOUT, "its storage holds", move |call| {
            call.tensors[at].storage_bytes = 1 << 20;
            call.tensors[at].storage = call.tensors[at].data.wrapping_byte_add(4);
        });
        let says = format!("{name} has storage_bytes -2");
        table.add(&says, RAPT_ERROR_LAYOUT, &says, move |call| call.tensors[at].storage_bytes = -2);
    }
    table.add("a negative stride that leaves the storage", RAPT_ERROR_LAYOUT, "its storage holds", |call| {
        call.tensors[K].storage_bytes = 4 * call.data[1].len() as i64;
        call.strides[K][2] = -4;
    });
    table.add("out that overlaps itself", RAPT_ERROR_LAYOUT, "out of shape", |call| call.strides[OUT][2] = 0);
    table.add("lse that overlaps itself", RAPT_ERROR_LAYOUT, "lse of shape", |call| call.strides[LSE][2] = 0);
    for (output, input) in
        [(OUT, Q), (OUT, K), (OUT, V), (OUT, SINKS), (OUT, SLOPES), (LSE, Q), (LSE, SINKS), (LSE, OUT)]
    {
        let says = format!("{} shares memory with {}", NAMES[output], NAMES[input]);
        let message = if (output, input) == (LSE, OUT) { "shares memory with".to_owned() } else { says.clone() };
        table.add(&says, RAPT_ERROR_LAYOUT, &message, move |call| {
            call.tensors[output].data = call.tensors[input].data;
        });
    }
    table.add("out that shares its last row with q", RAPT_ERROR_LAYOUT, "out shares memory with q", |call| {
        call.tensors[OUT].data = call.tensors[Q].data.wrapping_byte_add(4 * (call.data[0].len() - 1));
    });
}

#[test]
fn bad_input_of_every_kind_is_refused_and_nothing_is_written() {
    let mut table = Table::default();
    for part in [pointers, codes, options, sizes, memory] {
        part(&mut table);
    }
    assert!(table.0.len() > 250, "{} cases", table.0.len());
    let engine = Owned::new(1);
    for seen in [false, true] {
        for Case { name, code, says, bend } in &table.0 {
            let mut call = Call::new(&engine, 5);
            if seen {
                // An engine that remembers the good call must not take the bad one for it.
                assert_eq!(call.run(), RAPT_OK);
                [3, 6].into_iter().for_each(|at| call.data[at].fill(BEFORE));
            }
            let inputs = [0, 1, 2, 4, 5].map(|at| call.data[at].clone());
            let mask = call.mask.clone();
            bend(&mut call);
            assert_eq!(call.run(), *code, "{name}: {}", last_error());
            assert!(last_error().contains(says.as_str()), "{name}: `{}` lacks `{says}`", last_error());
            assert_eq!(rapt_last_error_code(), *code, "{name}");
            assert!(call.outputs().into_iter().flatten().all(|x| *x == BEFORE), "{name}: an output was written");
            assert_eq!([0, 1, 2, 4, 5].map(|at| call.data[at].clone()), inputs, "{name}: an input was written");
            assert_eq!(call.mask, mask, "{name}");

            // Asked what it would run, the library refuses the same.
            let mut text: *mut c_char = std::ptr::dangling_mut();
            let [q, k, v, out] = call.args;
            // SAFETY: as in `Call::run`.
            let explained = unsafe { rapt_explain(call.engine, q, k, v, out, call.options_arg, &raw mut text) };
            assert_eq!((explained, text), (*code, std::ptr::dangling_mut()), "{name}: {}", last_error());
        }
    }
    assert_eq!(Call::new(&engine, 5).run(), RAPT_OK, "the engine serves on");
}

/// K and V of 2^58 expanded keys ask for petabytes of partial results.
#[test]
fn memory_that_cannot_be_had_is_an_answer() {
    let engine = Owned::new(1);
    let mut call = Call::new(&engine, 2);
    call.options.mask = std::ptr::null();
    for at in [K, V] {
        (call.shapes[at][2], call.strides[at][2]) = (1 << 58, 0);
    }
    assert_eq!(call.run(), RAPT_ERROR_OUT_OF_MEMORY, "{}", last_error());
    assert!(last_error().contains("bytes of workspace"), "{}", last_error());
    assert!(call.outputs().into_iter().flatten().all(|x| *x == BEFORE));
    assert_eq!(Call::new(&engine, 2).run(), RAPT_OK, "{}", last_error());
}

#[test]
fn an_error_is_the_last_of_its_thread_and_survives_success() {
    let engine = Owned::new(1);
    assert_eq!((last_error().as_str(), rapt_last_error_code()), ("", RAPT_OK));
    let mut call = Call::new(&engine, 1);
    call.options.causal = 9;
    assert_eq!(call.run(), RAPT_ERROR_OPTION);
    let other = std::thread::spawn(|| (last_error(), rapt_last_error_code())).join().unwrap();
    assert_eq!(other, (String::new(), RAPT_OK), "a thread sees its own errors only");
    assert_eq!(Call::new(&engine, 1).run(), RAPT_OK);
    assert!(last_error().contains("causal = 9"));
}

#[test]
fn engines_refuse_numbers_of_threads_that_are_none() {
    for threads in [-1, i32::MIN] {
        assert!(rapt_engine_create(threads).is_null());
        assert_eq!(rapt_last_error_code(), RAPT_ERROR_OPTION);
        assert!(last_error().contains(&format!("threads = {threads}")), "{}", last_error());
    }
    for (adapter, code, text) in
        [(-1, RAPT_ERROR_OPTION, "adapter = -1"), (4711, RAPT_ERROR_DEVICE, "vulkan:4711 is not available")]
    {
        assert!(rapt_engine_gpu(adapter).is_null());
        assert_eq!(rapt_last_error_code(), code);
        assert!(last_error().contains(text), "{}", last_error());
    }
    // SAFETY: NULL is ignored.
    unsafe {
        rapt_engine_destroy(std::ptr::null_mut());
        rapt_string_free(std::ptr::null_mut());
    }
}

#[test]
fn capabilities_are_told_and_bad_arguments_refused() {
    let engine = Owned::new(3);
    // SAFETY: zero and NULL are values of each field.
    let mut told: rapt_capabilities = unsafe { std::mem::zeroed() };
    let mut ask = |engine, size, to_null| {
        told.size = size;
        let to = if to_null { std::ptr::null_mut() } else { &raw mut told };
        // SAFETY: an engine or NULL, and a struct or NULL.
        (unsafe { rapt_engine_capabilities(engine, to) }, told)
    };
    const SIZE: usize = size_of::<rapt_capabilities>();
    assert_eq!(ask(std::ptr::null(), SIZE, false).0, RAPT_ERROR_POINTER);
    assert_eq!(ask(engine.0, SIZE, true).0, RAPT_ERROR_POINTER);
    for size in [0, SIZE - 1, SIZE + 8] {
        let (code, told) = ask(engine.0, size, false);
        assert_eq!((code, told.threads), (RAPT_ERROR_OPTION, 0));
        assert!(last_error().contains("capabilities.size"), "{}", last_error());
    }
    let (code, told) = ask(engine.0, SIZE, false);
    assert_eq!((code, told.size, told.threads), (RAPT_OK, SIZE, 3));
    // SAFETY: an array of that length and two strings, of the library.
    let (dtypes, isa, isas) = unsafe {
        let dtypes = std::slice::from_raw_parts(told.dtypes, told.num_dtypes as usize);
        (dtypes, std::ffi::CStr::from_ptr(told.isa), std::ffi::CStr::from_ptr(told.isas))
    };
    assert_eq!(dtypes, [8, 7, 6, 13]);
    let names: Vec<&str> = isas.to_str().unwrap().split(' ').collect();
    assert_eq!(names, engine::available_isas().iter().map(|isa| isa.name()).collect::<Vec<_>>());
    assert!(names.contains(&isa.to_str().unwrap()));
}

#[test]
fn strides_of_a_shape() {
    let mut strides = [-1i64; 8];
    let mut of = |ndim: i32, shape: &[i64], to_null: bool| {
        let to = if to_null { std::ptr::null_mut() } else { strides.as_mut_ptr() };
        let shape = if shape.is_empty() { std::ptr::null() } else { shape.as_ptr() };
        // SAFETY: as many numbers as `ndim` says where it is served, or NULL.
        (unsafe { rapt_contiguous_strides(ndim, shape, to) }, strides)
    };
    assert_eq!(of(3, &[2, 3, 4], false), (RAPT_OK, [12, 4, 1, -1, -1, -1, -1, -1]));
    assert_eq!(of(0, &[], false).0, RAPT_OK);
    assert_eq!(of(3, &[], false).0, RAPT_ERROR_POINTER);
    assert_eq!(of(3, &[2, 3, 4], true).0, RAPT_ERROR_POINTER);
    assert_eq!(of(2, &[2, -3], false).0, RAPT_ERROR_SHAPE);
    assert_eq!(of(2, &[1 << 62, 1 << 62], false).0, RAPT_ERROR_SHAPE);
    assert_eq!(of(-1, &[1], false).0, RAPT_ERROR_SHAPE);
    assert_eq!(of(9, &[1; 9], false).0, RAPT_ERROR_SHAPE);
}

#[test]
fn explain_refuses_a_text_that_cannot_be_written() {
    let engine = Owned::new(1);
    let call = Call::new(&engine, 1);
    let [q, k, v, out] = call.args;
    // SAFETY: what is neither NULL nor unaligned is what it says.
    let code = |text| unsafe { rapt_explain(call.engine, q, k, v, out, call.options_arg, text) };
    assert_eq!(code(std::ptr::null_mut()), RAPT_ERROR_POINTER);
    assert!(last_error().contains("text is NULL"), "{}", last_error());
    let mut text: *mut c_char = std::ptr::null_mut();
    assert_eq!(code((&raw mut text).wrapping_byte_add(1)), RAPT_ERROR_POINTER);
    assert_eq!(code(&raw mut text), RAPT_OK);
    // SAFETY: a string of rapt_explain().
    let table = unsafe { std::ffi::CStr::from_ptr(text) }.to_str().unwrap().to_owned();
    assert!(table.contains("kernel") && table.contains("bytes_copied"), "{table}");
    // SAFETY: as above; not given back before.
    unsafe { rapt_string_free(text) };
    assert!(call.outputs().into_iter().flatten().all(|x| *x == BEFORE));
}
