//! NVIDIA's run-time compiler, when it is installed.

use std::ffi::{CString, c_char, c_int, c_void};

use libloading::Library;

type Code = c_int;
type Program = *mut c_void;

/// Names of the compiler's library, newest first.
const LIBRARIES: &[&str] = if cfg!(windows) {
    &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"]
} else {
    &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
};

macro_rules! compiler_calls {
    ($( $call:ident as $symbol:literal ($($kind:ty),*); )*) => {
        struct Compiler {
            $( $call: unsafe extern "C" fn($($kind),*) -> Code, )*
            _library: Library,
        }

        impl Compiler {
            fn find(library: Library) -> Result<Self, String> {
                $(
                    // SAFETY: the type is the one that the library's documentation gives for the symbol.
                    let $call = *unsafe {
                        library.get::<unsafe extern "C" fn($($kind),*) -> Code>(concat!($symbol, "\0").as_bytes())
                    }
                    .map_err(|e| e.to_string())?;
                )*
                Ok(Self { $( $call, )* _library: library })
            }
        }
    };
}

compiler_calls! {
    create as "nvrtcCreateProgram" (*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
    destroy as "nvrtcDestroyProgram" (*mut Program);
    compile as "nvrtcCompileProgram" (Program, c_int, *const *const c_char);
    log_size as "nvrtcGetProgramLogSize" (Program, *mut usize);
    log as "nvrtcGetProgramLog" (Program, *mut c_char);
    cubin_size as "nvrtcGetCUBINSize" (Program, *mut usize);
    cubin as "nvrtcGetCUBIN" (Program, *mut c_char);
}

/// A program of one compilation, destroyed with it.
struct Running<'a>(&'a Compiler, Program);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        // SAFETY: created by `create`.
        let _ = unsafe { (self.0.destroy)(&raw mut self.1) };
    }
}

impl Running<'_> {
    fn bytes(
        &self,
        size: unsafe extern "C" fn(Program, *mut usize) -> Code,
        read: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    ) -> Option<Vec<u8>> {
        let mut count = 0;
        // SAFETY: writes one size.
        if unsafe { size(self.1, &raw mut count) } != 0 {
            return None;
        }
        let mut out = vec![0u8; count];
        // SAFETY: writes as many bytes as it said.
        if unsafe { read(self.1, out.as_mut_ptr().cast()) } != 0 {
            return None;
        }
        Some(out)
    }
}

/// Compiles a source with its headers (name, text) for an architecture (`sm_90`); the cubin, or why there is none.
pub(crate) fn compile(
    name: &str,
    source: &str,
    headers: &[(&str, &str)],
    architecture: &str,
    flags: &[&str],
) -> Result<Vec<u8>, String> {
    let compiler = load()?;
    let text = |value: &str| CString::new(value).map_err(|error| error.to_string());
    let (source, name) = (text(source)?, text(name)?);
    let names = headers.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>, _>>()?;
    let bodies = headers.iter().map(|(_, body)| text(body)).collect::<Result<Vec<_>, _>>()?;
    let mut options = vec![text(&format!("--gpu-architecture={architecture}"))?];
    for flag in flags {
        options.push(text(flag)?);
    }
    let pointers = |list: &[CString]| list.iter().map(|t| t.as_ptr()).collect::<Vec<_>>();
    let (names, bodies, options_at) = (pointers(&names), pointers(&bodies), pointers(&options));
    let mut program = std::ptr::null_mut();
    // SAFETY: all strings end with a zero and outlive the call; the lists have the count given.
    let code = unsafe {
        (compiler.create)(
            &raw mut program,
            source.as_ptr(),
            name.as_ptr(),
            headers.len() as c_int,
            bodies.as_ptr(),
            names.as_ptr(),
        )
    };
    if code != 0 {
        return Err(format!("nvrtcCreateProgram: error {code}"));
    }
    let running = Running(&compiler, program);
    // SAFETY: the program is alive and the options end with zeros.
    let code = unsafe { (compiler.compile)(program, options_at.len() as c_int, options_at.as_ptr()) };
    if code != 0 {
        let log = running.bytes(compiler.log_size, compiler.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        return Err(format!("nvrtcCompileProgram: error {code}: {}", log.trim_end_matches('\0').trim()));
    }
    running.bytes(compiler.cubin_size, compiler.cubin).ok_or_else(|| "NVRTC gave no code".to_owned())
}

fn load() -> Result<Compiler, String> {
    let mut said = String::new();
    for name in LIBRARIES {
        // SAFETY: the compiler's own library, meant to be loaded.
        match unsafe { Library::new(name) } {
            Ok(library) => return Compiler::find(library),
            Err(error) if said.is_empty() => said = error.to_string(),
            Err(_) => {}
        }
    }
    Err(said)
}
