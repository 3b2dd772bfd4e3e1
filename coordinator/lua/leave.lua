-- ARGV: worker id, incarnation.
local id = ARGV[1]
if redis.call('HGET', key('node', id), 'incarnation') ~= ARGV[2] then return 0 end
redis.call('DEL', key('node', id), key('node', id, 'alive'), key('node', id, 'prefixes'))
redis.call('ZREM', key('nodes'), id)
return 1
