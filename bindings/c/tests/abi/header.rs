//! include/rapt.h and include/rapt_types.h are what cbindgen writes of src/, name what the engine names, and are of this version.
//!
//! `RAPT_UPDATE_SNAPSHOTS=1 cargo test -p rapt-c the_headers_are_what` writes them anew.

use std::ffi::CStr;
use std::path::{Path, PathBuf};

use cbindgen::ItemType;
use engine::DType;

/// The functions, behind the types.
const FUNCTIONS: &str = "rapt.h";
/// Constants, enums, structs and handles.
const TYPES: &str = "rapt_types.h";

fn generate(header: &str) -> String {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut config = cbindgen::Config::from_file(here.join("cbindgen.toml")).unwrap();
    if header == TYPES {
        config.export.item_types = vec![ItemType::Constants, ItemType::Enums, ItemType::Structs, ItemType::OpaqueItems];
        config.include_guard = Some("RAPT_TYPES_H".to_owned());
        config.header = Some("// The types of rapt.h, which includes this file.".to_owned());
        config.sys_includes = vec!["stddef.h".to_owned(), "stdint.h".to_owned()];
    } else {
        config.export.item_types = vec![ItemType::Functions];
        config.includes = vec![TYPES.to_owned()];
    }
    let sources = ["src/abi.rs", "src/lib.rs"].map(|file| here.join(file));
    let builder = sources.iter().fold(cbindgen::Builder::new().with_config(config), cbindgen::Builder::with_src);
    let mut bytes = Vec::new();
    builder.generate().unwrap().write(&mut bytes);
    String::from_utf8(bytes).unwrap()
}

fn path(header: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include").join(header)
}

fn checked_in(header: &str) -> String {
    std::fs::read_to_string(path(header)).unwrap_or_default()
}

#[test]
fn the_headers_are_what_the_sources_say() {
    for header in [TYPES, FUNCTIONS] {
        let generated = generate(header);
        if std::env::var("RAPT_UPDATE_SNAPSHOTS").is_ok_and(|value| value == "1") {
            std::fs::write(path(header), &generated).unwrap();
        }
        let held = checked_in(header);
        let differs = generated.lines().zip(held.lines()).position(|(new, old)| new != old);
        let line = differs.unwrap_or_else(|| generated.lines().count().min(held.lines().count()));
        assert!(
            generated == held,
            "include/{header} differs from bindings/c/src at line {}:\n  {}\nwrite it anew with RAPT_UPDATE_SNAPSHOTS=1",
            line + 1,
            generated.lines().nth(line).unwrap_or("(its end)")
        );
    }
}

/// `NAME = number,` of an enum of the headers.
fn values(prefix: &str) -> Vec<(String, i32)> {
    let header = checked_in(TYPES);
    let lines = header.lines().filter_map(|line| line.trim().strip_suffix(',')?.split_once(" = "));
    let found = lines.filter(|(name, _)| name.starts_with(prefix));
    found.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect()
}

#[test]
fn every_dtype_of_the_engine_has_its_code() {
    let expected: Vec<(String, i32)> = DType::ALL
        .iter()
        .map(|dtype| (format!("RAPT_DTYPE_{}", format!("{dtype:?}").to_uppercase()), i32::from(dtype.code())))
        .collect();
    assert_eq!(values("RAPT_DTYPE_"), expected);
    for dtype in DType::ALL {
        let code = i32::from(dtype.code());
        // SAFETY: the name of a code that is known is a string of the library.
        let name = unsafe { CStr::from_ptr(rapt_c::rapt_dtype_name(code)) };
        assert_eq!((name.to_str(), rapt_c::rapt_dtype_bits(code)), (Ok(dtype.name()), dtype.bits()));
    }
    for code in [-1, 14, 27, 36, 256, 263, i32::MIN] {
        assert!(rapt_c::rapt_dtype_name(code).is_null(), "{code}");
        assert_eq!(rapt_c::rapt_dtype_bits(code), 0, "{code}");
    }
}

#[test]
fn every_error_has_its_name() {
    let mut codes = vec![("RAPT_OK".to_owned(), 0)];
    codes.extend(values("RAPT_ERROR_"));
    assert_eq!(codes.len(), 17);
    let name = |code| {
        // SAFETY: a string of the library.
        unsafe { CStr::from_ptr(rapt_c::rapt_error_name(code)) }.to_str().unwrap()
    };
    for (expected, code) in codes {
        assert_eq!(name(code), expected);
    }
    for code in [-1, 17, i32::MAX] {
        assert_eq!(name(code), "unknown");
    }
}

#[test]
fn the_header_is_of_this_version() {
    let version = [rapt_c::RAPT_VERSION_MAJOR, rapt_c::RAPT_VERSION_MINOR, rapt_c::RAPT_VERSION_PATCH];
    assert_eq!(version.map(|part| part.to_string()).join("."), env!("CARGO_PKG_VERSION"));
    // SAFETY: a string of the library.
    assert_eq!(unsafe { CStr::from_ptr(rapt_c::rapt_version()) }.to_str(), Ok(env!("CARGO_PKG_VERSION")));
}

/// Where each field lies in version 0.1: programs compiled then rely on it.
#[cfg(target_pointer_width = "64")]
#[test]
fn no_field_has_moved() {
    use std::mem::offset_of;
    macro_rules! check {
        ($of:ident, $size:literal, $($field:ident $at:literal),*) => {{
            $(assert_eq!(offset_of!(rapt_c::$of, $field), $at, "{}.{}", stringify!($of), stringify!($field));)*
            assert!(size_of::<rapt_c::$of>() >= $size);
        }};
    }
    check!(
        rapt_tensor, 56, data 0, dtype 8, device 12, device_index 16, ndim 20, shape 24, strides 32, storage_bytes 40,
        storage 48
    );
    assert_eq!(size_of::<rapt_c::rapt_tensor>(), 56, "it has no size, so it cannot grow");
    check!(
        rapt_options, 160, size 0, given 8, causal 12, layout 16, out_dtype 20, softmax_scale 24, softcap 32,
        window_left 40, window_right 48, mask 56, sinks 64, alibi_slopes 72, lse 80, q_codes 88, k_codes 96, v_codes 104,
        tolerance 112, compute 120, dropout_p 128, dropout_seed 136, dropout_offset 144,
        dropout_draw 152
    );
    check!(
        rapt_codes, 56, size 0, format 8, granularity 12, block_size 16, head_dim 24, descale 32, zero_point 40,
        global_scale 48, scale_layout 56
    );
    check!(
        rapt_tolerance, 56, size 0, limit 8, k_measured 16, v_measured 24, k_original 32, v_original 40, judgement 48
    );
    check!(
        rapt_judgement, 48, size 0, quantized 8, fell_back 16, worst_estimate 24, worst_bound 32, worst_epsilon 40
    );
    check!(
        rapt_kvcache, 56, size 0, k_cache 8, v_cache 16, cache_seqlens 24, page_table 32, k 40, v 48
    );
    check!(
        rapt_kv_cache_form, 72, size 0, num_pages 8, page_size 16, num_kv_heads 24, head_dim 32, head_dim_v 40, dtype 48,
        k_codes 56, v_codes 64
    );
    check!(rapt_kv_cache_pages, 40, size 0, k_cache 8, v_cache 16, k_codes 24, v_codes 32);
    check!(rapt_gradients, 56, size 0, d_lse 8, dq 16, dk 24, dv 32, d_mask 40, d_sinks 48);
    check!(rapt_port, 48, size 0, name 8, dtype 16, ndim 20, is_written 24, is_dynamic 28, shape 32, sizes 40);
    check!(rapt_capabilities, 40, size 0, threads 8, num_dtypes 12, dtypes 16, isa 24, isas 32);
}
